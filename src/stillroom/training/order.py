"""The order of rows: a function of the seed and the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from stillroom import seeds


class KeyedSampler(torch.utils.data.Sampler[int]):
    """Row order as a function of (seed, epoch).

    The epoch is asked for when an order begins: `set_epoch` does not reach a sampler behind the wrappers
    that several workers or a resumed epoch put around it.
    """

    def __init__(self, num_rows: int, seed: int, epoch: Callable[[], int]) -> None:
        self.num_rows, self.seed, self.epoch = num_rows, seed, epoch

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        return iter(seeds.permutation(self.num_rows, self.seed, "shuffle", self.epoch()))
