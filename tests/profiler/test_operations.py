"""What two real ranks are timed at, between CPUs, is a layer that they divide as training does it."""

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from autopar.profiler import operations
from autopar.profiler.operations import Operation, Pace, time_operation
from autopar.ranks.pool import RankPool
from paths import HARNESS


@pytest.mark.slow
def test_a_layer_is_gathered_and_scattered_once_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
    # Parts of four parameters are rounded up; a layer that is scattered again and again is gathered no more.
    sizes = {64: 16, 100_000: 25_000, 100_004: 25_008}
    with RankPool(2) as pool:
        found = {size: pool.run("jobs_for_ranks:moved", {"bytes": size}) for size in sizes}
    for size, ranks in found.items():
        for name, word in (("gather", "all"), ("scatter", "reduce")):
            for rank in ranks:
                seen = rank[name]["seen"]
                assert [count for _, count in seen] == [sizes[size]] * 2
                assert {each.split("_")[0] for each, _ in seen} == {word}
                assert min(rank[name]["seconds"]) > 0
        # Every rank is told the same mean of all.
        for kind in ("all_gather", "reduce_scatter"):
            assert ranks[0][kind] == ranks[1][kind]
            assert (len(ranks[0][kind]), min(ranks[0][kind]) > 0) == (2, True)


def test_a_round_trip_is_two_messages_and_what_ranks_do_together_counts_by_its_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context: Any = SimpleNamespace(device=torch.device("cpu"), rank=0)
    stand_ins = {"_work": Mock(), "gathering": Mock(return_value=lambda: 1.0), "_agree": Mock()}
    stand_ins["Computing"] = Mock(return_value=Mock(counts=lambda seconds: [1 for _ in seconds]))
    stand_ins |= {"_agree": lambda *_: 1, "_rounds": lambda group, turns, *_: [[9.0, 2.0, 4.0] for _ in turns]}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(operations, name, stand_in)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group: tensor.mul_(2))
    for kind, ranks, seconds in (
        ("p2p", (0, 1), [2.0] * 2),
        ("p2p", (1, 0), None),
        ("all_reduce", (0, 1), [5.0] * 2),
        ("all_gather", (0, 1), [5.0] * 2),
    ):
        operation = Operation(context, kind, ranks, Mock())  # type: ignore[arg-type]
        assert time_operation(operation, [8, 16], Pace()) == seconds
