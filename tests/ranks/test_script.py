"""Ranks of a script: one by itself, or those of the script's own group, which stays and must carry what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from autopar.errors import UsageError
from autopar.ranks.script import join_in_script


@contextmanager
def own_group(backend: str) -> Iterator[None]:
    """Have the process group of a script with one rank."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_process_by_itself_is_the_only_rank_while_it_takes_part() -> None:
    with join_in_script("cpu", 5.0, 1) as context:
        assert (context.rank, context.size, context.backend, context.leads_host) == (0, 1, "gloo", True)
        assert context.gather("größe") == ["größe"]
        assert not context.has_external_group
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match=r"needs 3 ranks, and this process is alone; .* --nproc-per-node 3"):
        join_in_script("cpu", 5.0, 3).__enter__()


def test_the_script_s_own_group_is_joined_and_stays_also_behind_an_error() -> None:
    left = []

    def fail() -> None:
        with join_in_script("cpu", 5.0, 1) as context:
            assert context.has_external_group
            context.on_leaving.append(lambda: left.append(context.rank))
            raise RuntimeError("in training")

    with own_group("gloo"):
        with pytest.raises(RuntimeError, match="in training"):
            fail()
        assert left == [0]
        total = torch.ones(1)
        dist.all_reduce(total)
        assert float(total) == 1


@pytest.mark.reliability(34)
def test_a_group_that_cannot_carry_a_plan_is_refused_with_the_backend_that_can() -> None:
    with own_group("gloo"), pytest.raises(UsageError, match="process group has 1 ranks, the plan needs 2"):
        join_in_script("cpu", 5.0, 2).__enter__()
    with own_group("cuda:gloo"), pytest.raises(UsageError, match=r"has the backend .*; initialise it with 'gloo'"):
        join_in_script("cpu", 5.0, 1).__enter__()


def test_ranks_that_a_launcher_started_are_as_many_as_the_plan_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="number of ranks started is 2, more than the 1 that the plan needs"):
        join_in_script("cpu", 5.0, 1).__enter__()
