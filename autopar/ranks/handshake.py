"""Handshake: ranks of a host that have something to tell each other open channels."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from collections.abc import Collection, Iterable

from autopar.errors import TrainingError
from autopar.ranks.channel import Channel, Way, new_way, supported
from autopar.ranks.context import RankContext

_RANK = struct.Struct("=Q")
_CREDENTIALS = struct.Struct("=iII")
"""Process, user and group, as the kernel tells them of a socket's other end."""


def partners(rank: int, pairs: Iterable[tuple[int, int]]) -> set[int]:
    """Return the ranks that have something to tell a rank, or to hear from it."""
    return {other for pair in pairs if rank in pair for other in pair} - {rank}


def open_channels(context: RankContext, pairs: Iterable[tuple[int, int]]) -> dict[int, Channel]:
    """Return this rank's channels by the rank at the other end; all ranks call this with the same pairs.

    Pairs of ranks have one where they are of one host, whose system supports it, and reach each other there: not from
    one container to another. The later rank of a pair makes it, and hands one end over. Channels are closed when the
    rank leaves its peers.

    Raises:
        TrainingError: a rank that has said it would open a channel did not.
    """
    pairs = list(pairs)
    if not pairs:
        return {}
    near = partners(context.rank, pairs) & _of_host(context) if supported() else set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        # An abstract name: it leaves no file behind.
        name = f"\0autopar-{secrets.token_hex(16)}"
        if supported():
            listener.bind(name)
            listener.listen(context.size)
            listener.settimeout(context.timeout_s)
        names = [json.loads(text) for text in context.gather(json.dumps(name if supported() else None))]
        later = [rank for rank in near if rank > context.rank]
        opened = _offer(context, {rank: names[rank] for rank in near if rank < context.rank})
        offers = [json.loads(text) for text in context.gather(json.dumps(sorted(opened)))]
        opened |= _accept(context, listener, [rank for rank in later if context.rank in offers[rank]])
    context.on_leaving.extend(channel.close for channel in opened.values())
    return opened


def _of_host(context: RankContext) -> set[int]:
    first = context.rank - context.local_rank
    return set(range(first, first + context.local_size))


def _offer(context: RankContext, names: dict[int, str | None]) -> dict[int, Channel]:
    """Make channels to the ranks that listen under these names, as far as they can be reached."""
    opened = {}
    for rank, name in names.items():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(name or "")
                _check_user(connection)
            except OSError:
                continue
            sends, receives = new_way()
            their_sends, their_receives = new_way()
            handed = (*their_sends, *receives)
            try:
                socket.send_fds(connection, [_RANK.pack(context.rank)], handed)
            finally:
                their_sends.close()
                receives.close()
            opened[rank] = Channel(sends, their_receives, context.timeout_s)
    return opened


def _accept(context: RankContext, listener: socket.socket, ranks: Collection[int]) -> dict[int, Channel]:
    """Take the ends that so many ranks hand over."""
    accepted: dict[int, Channel] = {}
    while len(accepted) < len(ranks):
        try:
            connection, _ = listener.accept()
            with connection:
                _check_user(connection)
                told, descriptors, _, _ = socket.recv_fds(connection, _RANK.size, 6)
        except PermissionError:
            continue
        except OSError as error:
            missing = sorted(set(ranks) - accepted.keys())
            raise TrainingError(
                f"rank {context.rank} could not open a channel with rank {missing[0]}: {error}"
            ) from error
        (rank,) = _RANK.unpack(told)
        accepted[rank] = Channel(Way(*descriptors[:3]), Way(*descriptors[3:]), context.timeout_s)
    return accepted


def _check_user(connection: socket.socket) -> None:
    """Make sure that the other end is of the same user: names can be seen by all."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(told)[1] != os.getuid():
        raise PermissionError("a channel was opened by another user")
