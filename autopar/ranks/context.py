"""RankContext: what a rank knows about itself and its peers, and how it joins them.

In comes where ranks meet; out come process groups, this rank's device, whether it has it for itself, and the network
interface of this host that leads to the others. Ranks of a user's own script are joined as torchrun started them, as
the script did, or a single one by itself.
"""

from __future__ import annotations

import gc
import ipaddress
import json
import os
import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, TrainingError, UsageError
from autopar.ranks.board import SET_UP_S, Board, HostsLink, Waiting
from autopar.ranks.device import FoundDevice, found_device
from autopar.ranks.environment import LaunchedRank, rank_from_environment
from autopar.ranks.failure import Failure, is_of_connection
from autopar.ranks.meeting import MetRanks, Place, as_launched, late_connections_dropped, meet, refuse
from autopar.ranks.setting_up import OtherRanks


def device_of(device_type: str, index: int) -> torch.device:
    """Return a rank's device, and make it the current one.

    Beyond the last GPU they are counted from the first again: a launcher may show each rank its own alone, or ranks may
    share.

    Raises:
        UsageError: the host has no such device.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "the plan is for GPUs, and torch finds none on this host; run it where they are, or profile here with "
            "`device='cpu'`"
        )
    index %= torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def each_its_own(identities: Sequence[str], *, share: bool) -> bool:
    """Return whether all ranks have different GPUs, given their identities in rank order.

    >>> each_its_own(["a", "b"], share=False), each_its_own(["a", "a"], share=True)
    (True, False)

    Raises:
        UsageError: ranks have the same GPU, and are not to share it; names them.
    """
    users: dict[str, list[int]] = defaultdict(list)
    for rank, identity in enumerate(identities):
        users[identity].append(rank)
    shared = [ranks for ranks in users.values() if len(ranks) > 1]
    if shared and not share:
        ranks = ", ".join(map(str, shared[0]))
        raise UsageError(
            f"ranks {ranks} have the same GPU; start no more ranks than there are GPUs, or let them share it: "
            "`share_gpus=True`"
        )
    return not shared


_SIOCGIFADDR = 0x8915
_REQUEST = struct.Struct("16s16x")


def interface_towards(address: str, port: int) -> str | None:
    """Return the interface from which this host reaches an address; None where it is local, IPv6, or not on Linux."""
    if sys.platform != "linux":
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it looks up the route.
            probe.connect((address, port))
            own = probe.getsockname()[0]
            if ipaddress.ip_address(own).is_loopback:
                return None
            names = [name for _, name in socket.if_nameindex()]
            return next((name for name in names if _address(probe, name) == own), None)
    except OSError:
        return None


def _address(probe: socket.socket, name: str) -> str | None:
    import fcntl

    try:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, _REQUEST.pack(name.encode()))
    except OSError:
        return None
    # struct ifreq: the name, then a sockaddr_in: family, port, address.
    return socket.inet_ntoa(answer[20:24])


Found = TypeVar("Found")


@dataclass(frozen=True)
class RankContext:
    """One process with one device, joined with its peers in a process group."""

    rank: int
    size: int
    local_rank: int
    """Index among the ranks of this host."""
    local_size: int
    """How many ranks this host runs."""
    device: torch.device
    timeout_s: float
    """Longest that a rank waits for another in training before the run is given up."""
    nccl: bool = False
    """Whether NCCL connects the ranks' devices; if not, what they tell each other passes through the hosts' memory."""
    board: Board | None = None
    """Where the rank says what it is doing, for whoever watches over it."""
    report: Callable[[dict[str, object]], None] = field(default=lambda message: None)
    """Sends a JSON-able message to whoever started the rank, while it works."""
    shares_group: bool = False
    """Whether the process group may stay when the rank leaves, being the script's or another job's, too."""
    meeting_port: int | None = None
    """At which ranks that a launcher has started have met."""
    on_leaving: list[Callable[[], None]] = field(default_factory=list)
    """Called when the rank leaves its peers: what was opened to reach them is closed."""
    placement: tuple[int, ...] = ()
    """Which rank each process has become, by the one that its launcher has made it; empty: the same."""
    await_others: Callable[[], None] = field(default=lambda: None)
    """Waits until all ranks are about to tell each other something; where nobody watches over them, names the late."""

    @property
    def launched_as(self) -> int:
        """The rank that the launcher has made it, by which supervisors and boards know it."""
        return self.placement.index(self.rank) if self.placement else self.rank

    @property
    def leader(self) -> int:
        """What the launcher's rank 0 has become: it speaks for all, and writes what is of all."""
        return self.placement[0] if self.placement else 0

    @property
    def ranks_of_host(self) -> tuple[int, ...]:
        """The ranks of this host, the one that leads it first."""
        first = self.launched_as - self.local_rank
        local = range(first, first + self.local_size)
        return tuple(self.placement[each] for each in local) if self.placement else tuple(local)

    @property
    def leads_host(self) -> bool:
        """Whether this rank does what one process per host does."""
        return self.local_rank == 0

    @property
    def note(self) -> Callable[[int, int], None]:
        """What notes the action of a step that the rank begins: step, position in its program."""
        return (
            (lambda step, position: None) if self.board is None else partial(self.board.write_action, self.launched_as)
        )

    @property
    def waiting(self) -> AbstractContextManager[None]:
        """The context in which the rank waits for others, as whoever watches over it can see."""
        return nullcontext() if self.board is None else Waiting(self.board, self.launched_as)

    def detect_nccl(self, *, share_gpus: bool) -> RankContext:
        """Return the context, knowing what connects the ranks' devices; all ranks ask at once.

        Raises:
            UsageError: ranks have the same GPU, and are not to share it.
        """
        if self.device.type == "cpu":
            return self
        # NCCL does not connect a GPU with itself.
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        own = each_its_own(self.gather(uuid), share=share_gpus)
        return replace(self, nccl=own and "cuda:nccl" in dist.get_backend_config())

    def leave(self) -> None:
        """Close what was opened to reach the other ranks."""
        for close in self.on_leaving:
            close()

    def barrier(self) -> None:
        self.await_others()
        with self.waiting:
            dist.barrier()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace a CPU tensor by rank 0's."""
        with self.waiting:
            dist.broadcast(tensor, 0)

    def gather(self, text: str) -> list[str]:
        """Return every rank's text, in rank order, on every rank; no pickle crosses."""
        content = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.await_others()
        with self.waiting:
            dist.all_gather(sizes, torch.tensor([content.numel()]))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: content.numel()] = content
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        with self.waiting:
            dist.all_gather(parts, padded)
        pairs = zip(parts, sizes, strict=True)
        return [bytes(part[: int(size)].tolist()).decode().strip("\0") for part, size in pairs]

    def gather_results(self, act: Callable[[], object]) -> list[Any]:
        """Have every rank act, and return what each of them found, which crosses as JSON, in rank order.

        Raises:
            AutoparError: what the first rank that failed raised, on all ranks; only their leader speaks.
        """
        answers = [json.loads(text) for text in self.gather(json.dumps(_answer(act)))]
        for answer in answers:
            if "failure" in answer:
                raise Failure(**answer["failure"]).as_common_error(self.launched_as)
        return [answer["found"] for answer in answers]

    def result_of_rank_0(self, act: Callable[[], Found]) -> Found:
        """Have rank 0 act, and return what it found, which crosses as JSON, on all ranks.

        Raises:
            AutoparError: what rank 0 raised, on all ranks.
        """
        answer = json.loads(self.gather(json.dumps(_answer(act) if self.rank == 0 else {}))[0])
        if "failure" in answer:
            raise Failure(**answer["failure"]).as_error()
        found: Found = answer["found"]
        return found


def _answer(act: Callable[[], object]) -> dict[str, object]:
    try:
        return {"found": act()}
    except Exception as error:
        return {"failure": Failure.of(error).as_dict()}


def _backend_of(device_type: str) -> str:
    """Return the communication backend for a device type, in torch's words."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" and dist.is_nccl_available() else "gloo"


@contextmanager
def join_ranks(
    rank: int,
    size: int,
    index: int,
    rendezvous: str,
    device_type: str,
    timeout_s: float,
    board: Board | None,
    report: Callable[[dict[str, object]], None],
    share_gpus: bool = False,
) -> Iterator[RankContext]:
    """Join ``size`` ranks of this host through a file that all of them name; leave when done.

    ``index`` is that of this rank's GPU, as of :func:`device_of`.

    Raises:
        UsageError: as :meth:`RankContext.detect_nccl`.
    """
    device = device_of(device_type, index)
    with nullcontext() if board is None else Waiting(board, rank):
        _make_group(device_type, timeout_s, rank, size, init_method=f"file://{rendezvous}")
    context = RankContext(rank, size, rank, size, device, timeout_s, board=board, report=report)
    try:
        if device.type == "cpu":
            # To a rank that still connects, one that has left looks as if it had died. GPUs are asked for below.
            context.barrier()
        yield context.detect_nccl(share_gpus=share_gpus)
    finally:
        _leave(context)


@contextmanager
def join_from_environment(
    launch: LaunchedRank,
    device_type: str,
    timeout_s: float,
    size: int,
    files: Mapping[str, str] | None = None,
    share_gpus: bool = False,
    board: Board | None = None,
    meeting_s: float | None = None,
    place: Place = as_launched,
) -> Iterator[RankContext]:
    """Join the ranks that a launcher has started, once all are there, were given the same files, and are placed.

    Ranks that nobody hears of are waited for ``meeting_s``, by default ``timeout_s``, and as long as one of this host
    uses a processor.

    Raises:
        UsageError: another number of ranks than ``size`` was started; or as :meth:`RankContext.detect_nccl`.
        AutoparError: as :func:`autopar.ranks.meeting.meet`.
    """
    _check_size(launch, size)
    device = device_of(device_type, launch.local_rank)
    group = device_type, timeout_s, files or {}, board, meeting_s or timeout_s
    store, placement = _join_group(launch, *group, found_device(device), place)
    own = (placement[launch.rank], launch.size, launch.local_rank, launch.local_size, device, timeout_s)
    context = RankContext(*own, board=board, meeting_port=launch.port, placement=placement)
    try:
        if board is not None:
            board.place(launch.rank, context.rank)
        if board is not None and not launch.one_host:
            local_ranks = context.gather(str(launch.local_rank))
            if context.leads_host:
                leaders = [each for each, rank in enumerate(placement) if int(local_ranks[rank]) == 0]
                context.on_leaving.append(HostsLink(store, board, launch.ranks_of_host, leaders).close)
        yield context.detect_nccl(share_gpus=share_gpus)
    finally:
        _leave(context)


def _check_size(launch: LaunchedRank, size: int) -> None:
    if launch.size != size:
        trouble = "more than" if launch.size > size else "fewer than"
        raise UsageError(f"the number of ranks started is {launch.size}, {trouble} the {size} that the plan needs")


def _join_group(
    launch: LaunchedRank,
    device_type: str,
    timeout_s: float,
    files: Mapping[str, str],
    board: Board | None,
    meeting_s: float,
    device: FoundDevice | None = None,
    place: Place = as_launched,
) -> MetRanks:
    """Make the process group of all ranks once they have met, of what they are by then; return the meeting's result."""
    interface = "lo" if launch.one_host else interface_towards(launch.address, launch.port)
    if interface is not None and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if board is not None:
        board.come(launch.rank)
    with nullcontext() if board is None else Waiting(board, launch.rank):
        met = meet(launch, files, meeting_s, board, device, place)
    try:
        _make_group(device_type, timeout_s, met.placement[launch.rank], launch.size, store=met.store)
    except (RuntimeError, ValueError) as error:
        address = f"{launch.address}:{launch.port}"
        raise TrainingError(f"rank {launch.rank} could not join the others at {address}: {error}") from error
    return met


def _leave(context: RankContext) -> None:
    context.leave()
    dist.destroy_process_group()


def _make_group(device_type: str, timeout_s: float, rank: int, size: int, **place: Any) -> None:  # noqa: ANN401
    """Make the default group, where ``place`` says that its ranks meet."""
    patience = timedelta(seconds=_patience_s(timeout_s))
    with late_connections_dropped():
        dist.init_process_group(_backend_of(device_type), rank=rank, world_size=size, timeout=patience, **place)


def _patience_s(timeout_s: float) -> float:
    """Return the default group's timeout: it serves setting up, training has groups of its own."""
    return max(timeout_s, SET_UP_S)


_jobs_in_group = 0
"""How many jobs of this process are in the default group, where such a job made it."""


@contextmanager
def _own_group(make: Callable[[], object]) -> Iterator[None]:
    """Return the context of a job in the default group, which the first one makes, and the last one to leave ends."""
    global _jobs_in_group
    if not _jobs_in_group:
        hook = sys.excepthook
        make()
        if hook.__module__ == dist.distributed_c10d.__name__:
            # Torch's, which says the rank before an error: once is enough.
            sys.excepthook = hook
    _jobs_in_group += 1
    try:
        yield
    finally:
        _jobs_in_group -= 1
        if not _jobs_in_group:
            dist.destroy_process_group()


@contextmanager
def join_in_script(
    device_type: str,
    timeout_s: float,
    size: int,
    share_gpus: bool = False,
    check: Callable[[], object] = lambda: None,
) -> Iterator[RankContext]:
    """Join ``size`` ranks: those of the script's own process group, else those that a launcher started, else one.

    Others hear what ``check`` raises, as they do what fails until the context is left.

    Raises:
        UsageError: there is another number of ranks, or the script's group cannot carry what training does.
        AutoparError: a rank's ``check`` does, or a rank has not come.
    """
    group: AbstractContextManager[None] = nullcontext()
    launch, refusal = None, _refusal_by(check)
    if not dist.is_initialized() or _jobs_in_group:
        launch = rank_from_environment(os.environ) if "WORLD_SIZE" in os.environ else None
        group = _own_group(lambda: _meet_others(launch, device_type, timeout_s, size, refusal))
    try:
        with group, _other_ranks(timeout_s) as await_others:
            if refusal is not None:
                raise refusal
            context = _of_group(launch, device_type, timeout_s, size, share_gpus, await_others)
            try:
                yield context
            finally:
                # The group may be the script's, or other jobs', too.
                context.leave()
    finally:
        # What lies in cycles may hold groups, whose threads must not outlive Python.
        gc.collect()


def _refusal_by(check: Callable[[], object]) -> AutoparError | None:
    try:
        check()
    except AutoparError as error:
        return error
    return None


def _meet_others(
    launch: LaunchedRank | None, device_type: str, timeout_s: float, size: int, refusal: AutoparError | None
) -> None:
    """Make the default group of the ranks that a launcher started, or of this process alone."""
    if launch is not None:
        refusal = refusal or _refusal_by(partial(_check_size, launch, size))
    if refusal is not None:
        if launch is not None:
            refuse(launch, refusal, timeout_s)
        raise refusal
    if launch is not None:
        _join_group(launch, device_type, timeout_s, {}, None, timeout_s)
    elif size > 1:
        raise UsageError(
            f"the plan needs {size} ranks, and this process is alone; start the script with "
            f"torchrun --nproc-per-node {size}"
        )
    else:
        _make_group(device_type, timeout_s, 0, 1, store=dist.HashStore())  # type: ignore[attr-defined]


@contextmanager
def _other_ranks(timeout_s: float) -> Iterator[Callable[[], None]]:
    """Return the context in which the other ranks of the default group hear of this one; yield what waits for them."""
    if dist.get_world_size() == 1:
        yield lambda: None
        return
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    # All ranks of a group have the same jobs, one after the other.
    own = dist.PrefixStore(f"autopar/job-{store.add(f'autopar/jobs/{rank}', 1)}", store)  # type: ignore[attr-defined]
    others, failure = OtherRanks(own, rank, dist.get_world_size(), timeout_s), None
    try:
        yield others.await_all
    except Exception as error:
        why = others.why_lost() if is_of_connection(error) else None
        failure = Failure.of(why or error)
        if why is not None:
            raise why from error
        raise
    finally:
        others.leave(failure)


def _of_group(
    launch: LaunchedRank | None,
    device_type: str,
    timeout_s: float,
    size: int,
    share_gpus: bool,
    await_others: Callable[[], None],
) -> RankContext:
    """Return what a rank of the default group knows; ``launch`` is what says where it is, if not torchrun's words."""
    rank, started = dist.get_rank(), dist.get_world_size()
    if started != size:
        raise UsageError(f"the script's process group has {started} ranks, the plan needs {size}")
    carried = dist.get_backend_config()
    if not all(f"{kind}:" in carried for kind in ("cpu", device_type)):
        wanted = _backend_of(device_type)
        raise UsageError(f"the script's process group has the backend {carried}; initialise it with {wanted!r}")
    if device_type == "cuda" and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # NCCL would then run all messages of a rank in one order, and wait for ever where two ranks differ in it.
        raise UsageError("the script's process group is bound to a device; initialise it without device_id")
    if launch is not None:
        local_rank, local_size = launch.local_rank, launch.local_size
    else:
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", started))
    device = device_of(device_type, local_rank)
    context = RankContext(rank, size, local_rank, local_size, device, timeout_s, shares_group=True)
    return replace(context, await_others=await_others).detect_nccl(share_gpus=share_gpus)
