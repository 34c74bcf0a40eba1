"""Meeting: ranks that a launcher started find each other, and find out what sets them apart before any works.

Once they are connected, nobody else has reason to come. Gloo opens a socket for every group of ranks, keeps it until
the group ends, and takes whatever connects: each connection is a descriptor that stays. The socket cannot be closed,
nor shut (Gloo would end the process), but the kernel can be told to drop what arrives there.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import socket
import stat
import struct
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, FileError, TrainingError, UsageError, printable, text_of
from autopar.ranks.board import Board
from autopar.ranks.device import FoundDevice
from autopar.ranks.environment import LaunchedRank
from autopar.ranks.failure import Failure
from autopar.ranks.setting_up import LOOK_S, Patience, Pulse, patiently, ranks_in_words

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


LOOPBACK = "127.0.0.1"

_VERDICT = "verdict"
PATIENCE_S = 5.0
"""After so long, a rank says what it waits for."""
_LATE_S = 1.0
_ANSWER_S = 30.0
"""How much longer than rank 0 the others wait, and how long rank 0 then waits for them to have heard."""


@dataclass
class _MeetingStore:
    """Where a rank meets others: its store, kept as long as this process, for rank 0's ends with it."""

    store: Store
    meetings: int = 0
    """Of the rank. All ranks of a script count alike, and what one job leaves in the store is nothing to the next."""


_MET: dict[tuple[str, int, int], _MeetingStore] = {}
"""By address, port and rank."""


class Arrival(NamedTuple):
    """What a rank says as it arrives; plain data."""

    host: str
    local_rank: int
    local_size: int
    versions: dict[str, str]
    """Of what must be the same software."""
    files: dict[str, str]
    """What the rank was given -> its digest."""
    device: FoundDevice = FoundDevice("cpu", "cpu", 0)

    def dumps(self) -> str:
        """Return it as JSON."""
        return json.dumps(self)

    @classmethod
    def loads(cls, text: str | bytes) -> Arrival:
        """Return what :meth:`dumps` has written."""
        found = cls(*json.loads(text))
        return found._replace(device=FoundDevice(*found.device))


def node_of_each(places: Sequence[tuple[str, int]]) -> list[int]:
    """Return every rank's node, from its host's name and its index among the ranks that one launcher started there.

    Ranks of a host are of one node, unless several launchers run on it: those count as nodes of their own.

    >>> node_of_each([("a", 0), ("a", 1), ("b", 0), ("b", 1)])
    [0, 0, 1, 1]
    >>> node_of_each([("a", 0), ("a", 1), ("a", 0), ("a", 1)])
    [0, 0, 1, 1]
    """
    seen: Counter[tuple[str, int]] = Counter()
    nodes: dict[tuple[str, int], int] = {}
    found = []
    for host, index in places:
        seen[host, index] += 1
        found.append(nodes.setdefault((host, seen[host, index]), len(nodes)))
    return found


class MetRanks(NamedTuple):
    """What ranks have once they have met."""

    store: Store
    """Through which they join."""
    placement: tuple[int, ...]
    """Which rank each is from now on, by the one that its launcher has made it."""


Place = Callable[[Sequence[Arrival]], Sequence[int]]
"""Returns the placement of ranks that have arrived, in the launcher's order, or raises an :class:`AutoparError`."""


def as_launched(arrivals: Sequence[Arrival]) -> Sequence[int]:
    """Return the placement of ranks that all stay what their launcher has made them."""
    return range(len(arrivals))


def meet(
    launch: LaunchedRank,
    files: Mapping[str, str],
    timeout_s: float,
    board: Board | None = None,
    device: FoundDevice | None = None,
    place: Place = as_launched,
) -> MetRanks:
    """Wait until all ranks are there, and return the store through which they join, and as what.

    Args:
        launch: which rank this is.
        files: what all ranks must have been given alike, with its digest.
        timeout_s: longest that ranks wait for each other while none of this host uses a processor.
        board: which says whether one does.
        device: what this rank has; none: that does not matter.
        place: makes a placement of what all ranks have; it is called on rank 0.

    Raises:
        TrainingError: a rank did not come; names it.
        UsageError: ranks run other versions, a host's ranks do not follow each other, or they cannot be placed.
        FileError: ranks were given other files.
    """
    _say_unknown(launch)
    worked_s = partial(board.worked_s, launch.ranks_of_host) if board is not None else lambda: 0.0
    with _impatience(f"rank {launch.rank}: waiting for rank 0 at {launch.address}:{launch.port}"):
        store = _store(launch, Patience(timeout_s, worked_s))
    versions = {"autopar": version("autopar"), "torch": torch.__version__}
    own = Arrival(platform.node(), launch.local_rank, launch.local_size, versions, dict(files))
    own = own if device is None else own._replace(device=device)
    with Pulse(store, worked_s) as pulse:
        patience = Patience(timeout_s, worked_s, pulse.heard_s)
        store.set(f"arrival/{launch.rank}", own.dumps())
        if launch.rank != 0:
            return MetRanks(store, _hear_verdict(launch, store, patience))
        try:
            placement = tuple(place(_arrivals(launch, store, patience)))
        except AutoparError as error:
            store.compare_set(_VERDICT, "", json.dumps({"failure": Failure.of(error).as_dict()}))
            _wait_until_heard(store, [rank for rank in range(1, launch.size) if store.check([f"arrival/{rank}"])])
            raise
        store.set(_VERDICT, json.dumps({"placement": placement}))
        return MetRanks(store, placement)


def refuse(launch: LaunchedRank, error: BaseException, patience_s: float = _ANSWER_S) -> None:
    """Come to the meeting of ranks only to say why this one takes no part: the others hear it at once, and end.

    Rank 0, with whose process the ranks' store may end, stays until they have heard, for some time.
    """
    if launch.size == 1:
        return
    failure, patience_s = replace(Failure.of(error), trace="").as_dict(), min(patience_s, _ANSWER_S)
    # Where nobody meets, nobody is to hear it.
    with suppress(AutoparError, RuntimeError):
        store = _store(launch, Patience(patience_s))
        store.compare_set(_VERDICT, "", json.dumps({"failure": failure, "refused": launch.rank}))
        store.set(f"heard/{launch.rank}", "")
        if launch.rank == 0:
            _wait_until_heard(store, range(1, launch.size), patience_s)


def _say_unknown(launch: LaunchedRank) -> None:
    """Say at once of a host that this one cannot find; it may yet get its name."""
    if problem := _name_problem(launch):
        sys.stderr.write(f"autopar: rank {launch.rank}: {problem}; waiting for it\n")


def _name_problem(launch: LaunchedRank) -> str:
    try:
        socket.getaddrinfo(_address(launch), launch.port)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no name of a host"
        return printable(f"the host {launch.address}, where rank 0 is to be, is not known here ({why})")
    return ""


def _hear_verdict(launch: LaunchedRank, store: Store, patience: Patience) -> tuple[int, ...]:
    """Wait for what rank 0 says, and return the placement; raise what it raises, or what a rank refuses."""
    where, late_s = f"{launch.address}:{launch.port}", patience.timeout_s + _ANSWER_S
    try:
        said = patiently(
            lambda: store.get(_VERDICT) if store.check([_VERDICT]) else None, partial(patience.is_over, late_s)
        )
    except RuntimeError as error:
        raise TrainingError(f"rank {launch.rank} met no rank 0 at {where}: it has ended") from error
    if said is None:
        raise TrainingError(f"rank {launch.rank} met no rank 0 at {where} in {late_s:g} s")
    verdict = json.loads(said)
    if "failure" in verdict:
        store.set(f"heard/{launch.rank}", "")
        raise _refusal_of(verdict) or Failure(**verdict["failure"]).as_common_error(launch.rank)
    return tuple(verdict["placement"])


def _refusal_of(verdict: dict[str, Any]) -> TrainingError | None:
    """Return what a rank says that hears of another that will not come; None where that is not so."""
    if "refused" not in verdict:
        return None
    return TrainingError(f"rank {verdict['refused']} refused: {verdict['failure']['message']}")


def _of_agents() -> bool:
    """Whether torchrun's agents hold a store already."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _address(launch: LaunchedRank) -> str:
    return LOOPBACK if launch.one_host and not _of_agents() else launch.address


def _store(launch: LaunchedRank, patience: Patience) -> Store:
    """Return what is this meeting's of the store of the ranks."""
    address = _address(launch)
    place = address, launch.port, launch.rank
    if place not in _MET:
        leads = launch.rank == 0 and not _of_agents()
        _MET[place] = _MeetingStore(_open_store(address, launch.port, launch, leads=leads, patience=patience))
    met = _MET[place]
    met.store.set_timeout(timedelta(seconds=patience.timeout_s))
    met.meetings += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return dist.PrefixStore(f"autopar/{attempt}/{met.meetings}", met.store)  # type: ignore[attr-defined]


def _open_store(address: str, port: int, launch: LaunchedRank, *, leads: bool, patience: Patience) -> Store:
    listener, timeout_s = None, patience.timeout_s
    try:
        if leads and launch.one_host:
            # Left to itself, the store listens everywhere.
            listener = socket.create_server((LOOPBACK, port), backlog=launch.size).detach()
        opening = partial(
            dist.TCPStore,  # type: ignore[attr-defined]
            address,
            port,
            is_master=leads,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        while True:
            try:
                store: Store = opening() if leads else _connect_store(opening, timeout_s)
            except (OSError, RuntimeError, ValueError):
                if leads or patience.is_over():
                    raise
                time.sleep(LOOK_S)
            else:
                return store
    except (OSError, RuntimeError, ValueError) as error:
        why = text_of(error) if leads else _refusal(launch, address) or text_of(error)
        raise TrainingError(f"rank {launch.rank} could not join the others at {address}:{port}: {why}") from error


def _refusal(launch: LaunchedRank, address: str) -> str:
    """Return who does not let a rank join, and how, as far as that can be found out."""
    if problem := _name_problem(launch):
        return problem
    try:
        socket.create_connection((address, launch.port), _LATE_S).close()
    except ConnectionRefusedError:
        return "nobody listens there, where rank 0 is to be: start it, or give its host and port"
    except OSError as error:
        return f"that host does not answer ({error.strerror or error})"
    return ""


def _connect_store(opening: Callable[[], Store], timeout_s: float) -> Store:
    """Connect to a store; left to itself, it waits without end for a listener that answers nothing.

    Raises:
        TimeoutError: nothing answered.
        Exception: as ``opening``.
    """
    found: Future[Store] = Future()

    def connect() -> None:
        try:
            found.set_result(opening())
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    # The store's own patience ends first where nobody listens.
    if not wait([found], timeout_s + _LATE_S).done:
        raise TimeoutError(
            f"what listens there has not answered in {timeout_s:g} s; give a --master-port that no other program holds"
        )
    return found.result()


def _arrivals(launch: LaunchedRank, store: Store, patience: Patience) -> list[Arrival]:
    """Wait for all ranks, and return what they say, which fits together."""
    where = f"{launch.address}:{launch.port}"
    missing = _missing(launch, store, lambda: patience.is_over(min(PATIENCE_S, patience.timeout_s)))
    if missing and patience.timeout_s > PATIENCE_S:
        sys.stderr.write(f"rank 0: waiting at {where} for {ranks_in_words(missing)} of {launch.size}\n")
        missing = _missing(launch, store, patience.is_over)
    if store.check([_VERDICT]) and (refusal := _refusal_of(json.loads(store.get(_VERDICT)))):
        raise refusal
    if missing:
        raise TrainingError(
            f"{ranks_in_words(missing)} of {launch.size} did not come to {where} within {patience.timeout_s:g} s; "
            "start a worker for each, on hosts that reach it"
        )
    found = [Arrival.loads(store.get(f"arrival/{rank}")) for rank in range(launch.size)]
    error = disagreement(found)
    if error is not None:
        raise error
    return found


def _missing(launch: LaunchedRank, store: Store, is_over: Callable[[], bool]) -> list[int]:
    """Wait for all ranks, and return those that have not come."""
    keys = [f"arrival/{rank}" for rank in range(launch.size)]
    # A store that is left to wait itself logs it when that takes too long.
    while not (store.check(keys) or store.check([_VERDICT]) or is_over()):
        time.sleep(LOOK_S)
    return [rank for rank, key in enumerate(keys) if not store.check([key])]


@contextmanager
def _impatience(text: str) -> Iterator[None]:
    """Say on standard error what is waited for, once it takes a while."""
    timer = threading.Timer(PATIENCE_S, sys.stderr.write, [f"{text}\n"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def disagreement(arrivals: Sequence[Arrival]) -> AutoparError | None:
    """Return the error that what ranks brought amounts to, or None where all fits."""
    for name in arrivals[0].versions:
        if apart := _apart(arrivals, [arrival.versions.get(name, "none") for arrival in arrivals]):
            return UsageError(f"hosts have different versions of {name}: {apart}; install the same everywhere")
    for name in arrivals[0].files:
        if apart := _apart(arrivals, [arrival.files.get(name, "none")[:12] for arrival in arrivals]):
            return FileError(f"the {name} is not the same on all hosts, by SHA-256: {apart}; give all the same")
    return _rank_order_error(arrivals)


def _apart(arrivals: Sequence[Arrival], values: Sequence[str]) -> str:
    """Say who has which of several values; nothing if there is one."""
    having: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        having[value].append(rank)
    if len(having) == 1:
        return ""
    return ", ".join(
        f"{value} on {ranks_in_words(ranks)} ({_hosts(arrivals, ranks)})" for value, ranks in having.items()
    )


def _rank_order_error(arrivals: Sequence[Arrival]) -> UsageError | None:
    for rank, own in enumerate(arrivals):
        first = rank - own.local_rank
        along = [each[:3] for each in arrivals[max(first, 0) :][: own.local_size]]
        if along != [(own.host, index, own.local_size) for index in range(own.local_size)]:
            return UsageError(
                f"rank {rank} is number {own.local_rank} of {own.local_size} on {own.host}, but the ranks of a host "
                "must follow each other; with srun, use --distribution=block"
            )
    return None


def _wait_until_heard(store: Store, ranks: Iterable[int], patience_s: float = _ANSWER_S) -> None:
    """Stay while ranks listen: the store may end with this process."""
    with suppress(RuntimeError):
        store.wait([f"heard/{rank}" for rank in ranks], timedelta(seconds=patience_s))


def _hosts(arrivals: Sequence[Arrival], ranks: Sequence[int]) -> str:
    return ", ".join(dict.fromkeys(arrivals[rank].host for rank in ranks))


_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of one instruction (struct sock_filter): return, and let nothing pass."""
_LISTENS = "0A"
"""A socket's state in the kernel's tables."""


@contextmanager
def late_connections_dropped() -> Iterator[None]:
    """Return the context in which groups of ranks are made; behind it, nobody connects to what they listen on.

    Elsewhere than on Linux, and where Gloo connects ranks only when they first exchange something, this does nothing.
    """
    if sys.platform != "linux" or os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        yield
        return
    before = set(_listening_sockets())
    yield
    for inode, descriptor in _listening_sockets().items():
        if inode not in before:
            _drop_all(descriptor)


def _listening_sockets() -> dict[int, int]:
    """Return the descriptors of the sockets on which this process listens for TCP connections, by their inodes."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    inet = each.family in (socket.AF_INET, socket.AF_INET6)
                    if inet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found[status.st_ino] = int(name)
    return found


def _drop_all(descriptor: int) -> None:
    """Have the kernel drop what arrives at a listening socket; connections that were accepted are others."""
    instructions = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    # Where a sandbox forbids it, connections pile up as they would.
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as each:
        each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def listens_everywhere(port: int) -> bool:
    """Return whether a process of this host listens at a port on all interfaces; False where that is not known."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                address, _, at = fields[1].partition(":")
                if fields[3] == _LISTENS and int(at, 16) == port and not int(address, 16):
                    return True
    return False
