"""Bytes count as long as the tensors that stand for them are alive, each storage once."""

from __future__ import annotations

import torch

from autopar.runtime.rehearsal.ledger import MemoryLedger
from autopar.runtime.times import VirtualClock


def test_bytes_count_as_long_as_their_storage_is_alive() -> None:
    clock = VirtualClock(0.0)
    ledger = MemoryLedger(clock, 100)
    tensor = ledger.count(torch.zeros(4), 30)
    clock.spend(1.0)
    view = tensor.detach().view(2, 2)
    # The same storage, whatever is said of it again.
    ledger.count(view, 50)
    del tensor
    assert ledger.alive_bytes == 130
    clock.spend(1.0)
    del view
    assert ledger.alive_bytes == 100
    assert ledger.moments == [(0.0, 100), (0.0, 130), (2.0, 100)]
    assert ledger.peak_bytes == 130


def test_what_is_held_for_a_while_is_noted_beside_what_is_alive() -> None:
    ledger = MemoryLedger(VirtualClock(0.0), 100)
    kept = ledger.count(torch.zeros(1), 10)
    ledger.spike(25)
    assert (ledger.alive_bytes, ledger.peak_bytes) == (110, 135)
    ledger.begin_step()
    # What is still alive is where the next step begins.
    assert (ledger.moments, ledger.peak_bytes) == ([(0.0, 110)], 110)
    del kept
    assert ledger.alive_bytes == 100


def test_nothing_counts_as_nothing() -> None:
    ledger = MemoryLedger(VirtualClock(0.0), 0)
    ledger.count(torch.zeros(1), 0)
    ledger.spike(0)
    assert ledger.moments == [(0.0, 0)]
