"""A rank among its peers: its device, the way to another host, and what ranks tell each other.

Ranks of a script: one by itself, or those of the script's own group, which stays and must carry what is asked.
"""

import random
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice

import pytest
import torch
import torch.distributed as dist

from autopar.errors import FileError, UsageError
from autopar.ranks.context import (
    RankContext,
    device_of,
    each_its_own,
    interface_towards,
    join_from_environment,
    join_in_script,
)
from autopar.ranks.environment import rank_from_environment
from autopar.ranks.pool import RankPool

PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
@pytest.mark.reliability(32)
def test_a_host_without_gpus_is_told_what_to_do() -> None:
    with pytest.raises(UsageError, match="torch finds none on this host; run it where they are, or profile here"):
        device_of("cuda", 0)


@pytest.mark.parametrize(("count", "devices"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (8, [0, 1, 2, 3])])
def test_ranks_of_a_host_take_its_gpus_in_turn(count: int, devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    assert [device_of("cuda", rank).index for rank in range(4)] == made == devices


def test_what_a_rank_was_started_as_and_whom_its_host_has_follow_from_the_placement() -> None:
    sizes = [2, 1, 3]
    for seed in range(20):
        placement = random.Random(seed).sample(range(6), 6)
        started = iter(placement)
        for size in sizes:
            host = tuple(islice(started, size))
            for local_rank, rank in enumerate(host):
                own = RankContext(rank, 6, local_rank, size, torch.device("cpu"), 1.0, placement=tuple(placement))
                found = (own.ranks_of_host, placement[own.launched_as], own.leader, own.leads_host)
                assert found == (host, rank, placement[0], rank == host[0])
    alone = RankContext(4, 6, 1, 3, torch.device("cpu"), 1.0)
    assert (alone.ranks_of_host, alone.launched_as, alone.leader) == ((3, 4, 5), 4, 0)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_have_one_gpu_are_named_unless_they_are_to_share_it(seed: int) -> None:
    draw = random.Random(seed)
    identities = [draw.choice("abcdefgh") for _ in range(draw.randint(1, 5))]
    shared = [name for name, users in Counter(identities).items() if users > 1]
    assert each_its_own(identities, share=True) == (not shared)
    if not shared:
        assert each_its_own(identities, share=False)
        return
    ranks = ", ".join(str(rank) for rank, name in enumerate(identities) if name == shared[0])
    with pytest.raises(UsageError, match=f"^ranks {ranks} have the same GPU; .* `share_gpus=True`"):
        each_its_own(identities, share=False)


def test_texts_and_what_every_rank_finds_or_what_went_wrong_on_one_all_ranks_learn() -> None:
    texts = ["größe", "", "x" * 5000]
    with RankPool(3) as pool:
        assert pool.run("jobs_for_ranks:gather_texts", {"texts": texts}) == [texts] * 3
        job = partial(pool.run, "jobs_for_ranks:share_results")
        assert job({"failing": [], "known": True}) == [[[[0, 3], [1, 3], [2, 3]], [0, 3]]] * 3
        # All are told of the first that failed, by rank 0; of what rank 0 finds, the others' failures are no part.
        first, *others = job({"failing": [1, 2], "known": True})
        assert first == [["FileError", "rank 1 finds nothing", FileError.exit_code], [0, 3]]
        assert others == [[["SaidElsewhereError", "rank 1 finds nothing", FileError.exit_code], [0, 3]]] * 2
        # An error that is not autopar's leaves nobody waiting, either.
        for gathered, alone in job({"failing": [0], "known": False}):
            assert gathered[1].startswith("KeyError: 'nothing'")
            assert alone[0] == "TrainingError"


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are told on Linux only")
def test_no_interface_leads_to_this_host_itself_and_the_others_are_of_this_host() -> None:
    assert interface_towards("127.0.0.1", 29500) is None
    assert interface_towards("no-such-host.invalid", 29500) is None
    # An address that is kept for documentation: no packet is sent, and a host without a network has no way there.
    found = interface_towards("192.0.2.1", 29500)
    assert found is None or found in {name for _, name in socket.if_nameindex()} - {"lo"}


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


def test_a_process_by_itself_or_in_the_scripts_own_group_takes_part() -> None:
    with join_in_script("cpu", 5.0, 1) as own:
        found = (own.rank, own.size, own.nccl, own.leads_host, own.gather("größe"))
        assert found == (0, 1, False, True, ["größe"])
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match=r"needs 3 ranks, and this process is alone; .* --nproc-per-node 3"):
        join_in_script("cpu", 5.0, 3).__enter__()
    left = []
    with own_group("gloo"):
        with pytest.raises(RuntimeError, match="in training"), join_in_script("cpu", 5.0, 1) as context:  # noqa: PT012
            assert context.shares_group
            context.on_leaving.append(lambda: left.append(context.rank))
            raise RuntimeError("in training")
        assert left == [0]
        total = torch.ones(1)
        dist.all_reduce(total)
        assert float(total) == 1


@pytest.mark.reliability(34)
def test_a_group_or_number_of_ranks_that_cannot_carry_a_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with own_group("gloo"), pytest.raises(UsageError, match="process group has 1 ranks, the plan needs 2"):
        join_in_script("cpu", 5.0, 2).__enter__()
    with own_group("cuda:gloo"), pytest.raises(UsageError, match=r"has the backend .*; initialise it with 'gloo'"):
        join_in_script("cpu", 5.0, 1).__enter__()
    with pytest.raises(UsageError, match=r"^the number of ranks started is 2, fewer than the 3 that the plan needs"):
        join_from_environment(rank_from_environment(PLAIN), "cpu", 1.0, 3).__enter__()
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="number of ranks started is 2, more than the 1 that the plan needs"):
        join_in_script("cpu", 0.1, 1).__enter__()
