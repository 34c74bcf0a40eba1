"""A rank among its peers: its device, the way to another host, and what ranks tell each other."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections import Counter

import pytest
import torch

from autopar.errors import UsageError
from autopar.ranks.context import device_of, each_its_own, interface_towards, join_from_environment
from autopar.ranks.environment import rank_from_environment
from autopar.ranks.pool import RankPool
from paths import HARNESS

PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_another_number_of_ranks_than_the_plan_s_is_refused_before_anyone_waits() -> None:
    with pytest.raises(UsageError) as caught, join_from_environment(rank_from_environment(PLAIN), "cpu", 1.0, 3):
        raise AssertionError
    assert str(caught.value).startswith("the number of ranks started is 2, fewer than the 3 that the plan needs")


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


def test_texts_of_any_length_reach_all_ranks_in_rank_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
    texts = ["größe", "", "x" * 5000]
    with RankPool(3) as pool:
        assert pool.run("jobs_for_ranks:gather_texts", {"texts": texts}) == [texts] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are told on Linux only")
def test_no_interface_leads_to_this_host_itself_and_the_others_are_of_this_host() -> None:
    assert interface_towards("127.0.0.1", 29500) is None
    assert interface_towards("no-such-host.invalid", 29500) is None
    # An address that is kept for documentation: no packet is sent, and a host without a network has no way there.
    found = interface_towards("192.0.2.1", 29500)
    assert found is None or found in {name for _, name in socket.if_nameindex()} - {"lo"}
