"""Who may connect to ranks, once they are connected."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from autopar.ranks.listeners import late_connections_dropped, listens_everywhere
from autopar.ranks.pool import RankPool
from paths import HARNESS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables of sockets")


@pytest.fixture(autouse=True)
def _jobs_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
    except TimeoutError:
        return False
    return True


def test_nobody_connects_to_ranks_that_are_connected_and_new_groups_are_made_all_the_same() -> None:
    with RankPool(3) as pool:
        for found in pool.run("jobs_for_ranks:listen_to_strangers"):
            assert isinstance(found, dict)
            # The default group and two others; one is made after strangers have come.
            assert found["listeners"] == 3
            assert found["connected"] == 0
            assert found["descriptors"] == 0
            assert found["sums"] == [3.0] * 4


def test_what_was_listened_on_before_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        with late_connections_dropped():
            new = socket.create_server(("127.0.0.1", 0))
        with new, socket.create_server(("127.0.0.1", 0)) as after:
            found = [connects(each.getsockname()[1]) for each in (before, new, after)]
    assert found == [True, False, True]


def test_where_ranks_connect_later_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with late_connections_dropped():
        new = socket.create_server(("127.0.0.1", 0))
    with new:
        assert connects(new.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "everywhere"), [("127.0.0.1", False), ("0.0.0.0", True), ("::1", False), ("::", True)]
)
def test_who_listens_on_all_interfaces_is_found(address: str, everywhere: bool) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        assert listens_everywhere(server.getsockname()[1]) is everywhere
