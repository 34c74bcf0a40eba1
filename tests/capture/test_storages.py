"""The bytes of all storages that are alive, against counting them one by one."""

from __future__ import annotations

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.effects import StorageTracker


@pytest.mark.parametrize("fake", [False, True])
def test_any_order_of_making_viewing_and_freeing_is_counted(fake: bool) -> None:
    draw = random.Random(9)
    mode = FakeTensorMode()
    with mode if fake else torch.no_grad(), StorageTracker() as tracker:
        # Of every tensor, the storage that it lies in: a storage is alive as long as one of its tensors.
        tensors: list[tuple[int, torch.Tensor]] = []
        sizes: dict[int, int] = {}
        peak = 0
        for number in range(200):
            way = draw.choice(("make", "view", "change", "free")) if tensors else "make"
            if way == "make":
                sizes[number] = 4 * draw.randint(1, 50)
                tensors.append((number, torch.zeros(sizes[number] // 4)))
            elif way == "view":
                key, tensor = draw.choice(tensors)
                tensors.append((key, tensor[:1]))
                del tensor
            elif way == "change":
                tensors[-1][1].add_(1)
            else:
                tensors.pop(draw.randrange(len(tensors)))
            alive = sum(sizes[key] for key in {key for key, _ in tensors})
            peak = max(peak, alive)
            assert (tracker.alive_bytes, tracker.peak_bytes) == (alive, peak)


def test_what_was_there_before_is_not_counted_and_what_changes_its_size_is() -> None:
    old = torch.ones(100)
    with StorageTracker() as tracker:
        old.mul_(2)
        view = old[1:]
        made = torch.ones(10)
        assert tracker.alive_bytes == 40
        made.untyped_storage().resize_(0)
        old.untyped_storage().resize_(800)
        assert tracker.alive_bytes == 0
        made.untyped_storage().resize_(400)
        assert (tracker.alive_bytes, tracker.peak_bytes) == (400, 400)
    del view, made
    assert tracker.alive_bytes == 0
    assert torch.UntypedStorage.resize_.__qualname__ != "StorageTracker.__enter__.<locals>.resize_and_count"


def test_sparse_tensors_count_their_indices_and_values() -> None:
    dense = torch.eye(4)
    with StorageTracker() as tracker:
        sparse = dense.to_sparse()
        # Two indices of eight bytes and a value of four for each of four entries.
        assert tracker.alive_bytes == 4 * (2 * 8 + 4)
        assert sparse.layout is torch.sparse_coo
