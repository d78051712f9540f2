"""Shared fixtures: the real data folder, and a network that is switched off."""

from __future__ import annotations

import os
import socket
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny matrices gain nothing from a second thread, and lose much when another process holds a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from jaxtyping import install_import_hook

# Shapes in signatures are checked while testing, and cost nothing otherwise.
SHAPES = install_import_hook(["stillroom.losses", "stillroom.models.vocab"], "beartype.beartype")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the loopback interface may be reached from a test."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in (
            "127.0.0.1",
            "::1",
            "localhost",
        ):
            raise AssertionError(f"a test tried to reach {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and models that lies beside a checkout; absent for most users."""
    if not SHARED.is_dir():
        pytest.skip("no shared/ folder beside the checkout")
    return SHARED
