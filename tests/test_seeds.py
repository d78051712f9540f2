"""Keyed randomness: pure, well spread, the same in Python and in torch."""

from __future__ import annotations

import math

import torch
from scipy import stats as reference

from stillroom import seeds


def test_a_key_depends_on_every_argument_and_on_nothing_else() -> None:
    base = seeds.key(1, "mix", 2, "row")
    assert base == seeds.key(1, "mix", 2, "row")
    others = {seeds.key(2, "mix", 2, "row"), seeds.key(1, "dropout", 2, "row"), seeds.key(1, "mix", 3, "row")}
    others |= {seeds.key(1, "mix", 2, "raw"), seeds.key(1, "mix", "row", 2), seeds.key(1, "mix", 2)}
    assert base not in others
    assert len(others) == 6
    assert 0 <= base < 1 << 63


def test_uniform_numbers_pass_a_test_of_uniformity() -> None:
    numbers = [seeds.uniform(0, "test", i) for i in range(4000)]
    assert reference.kstest(numbers, "uniform").pvalue > 0.001


def test_a_permutation_is_one_and_changes_with_the_epoch() -> None:
    first, second = (seeds.permutation(100, 0, "shuffle", epoch) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert first == seeds.permutation(100, 0, "shuffle", 0)


def test_every_place_is_reached_about_equally_often_by_a_shuffle() -> None:
    places = [seeds.permutation(5, seed, "shuffle").index(0) for seed in range(2000)]
    assert reference.chisquare([places.count(i) for i in range(5)]).pvalue > 0.001


def test_the_tensor_mix_gives_the_bits_of_the_python_mix() -> None:
    values = [0, 1, 5, 2**40 + 3, 2**62, 2**63 - 1]
    mixed = seeds._mix_tensor(torch.tensor(values))
    assert [m % (1 << 64) for m in mixed.tolist()] == [seeds._mix(v) for v in values]


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    keys = torch.tensor([seeds.key(0, "rows", i) for i in range(200)])
    noise = seeds.gumbel(keys, position=7, width=50).flatten()
    assert torch.isfinite(noise).all()
    assert reference.kstest(noise.numpy(), "gumbel_r").pvalue > 0.001


def test_gumbel_noise_of_a_row_does_not_depend_on_its_batch_and_changes_with_the_position() -> None:
    keys = torch.tensor([seeds.key(0, "rows", i) for i in range(8)])
    together = seeds.gumbel(keys, 3, 16)
    assert torch.equal(together[5:6], seeds.gumbel(keys[5:6], 3, 16))
    assert not torch.equal(together, seeds.gumbel(keys, 4, 16))


def test_argmax_of_logits_plus_noise_is_a_sample_of_the_softmax() -> None:
    probabilities = torch.tensor([0.6, 0.3, 0.09, 0.01])
    keys = torch.tensor([seeds.key(1, "rows", i) for i in range(20000)])
    drawn = (probabilities.log() + seeds.gumbel(keys, 0, 4)).argmax(1)
    counts = torch.bincount(drawn, minlength=4)
    assert reference.chisquare(counts.numpy(), (probabilities * len(keys)).double().numpy()).pvalue > 0.001
    assert math.isclose(counts.sum(), len(keys))
