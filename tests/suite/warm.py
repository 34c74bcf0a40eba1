"""Warm: start Python commands as `subprocess` does, forked from a process that has imported autopar and torch already.

Where starting itself is what is tested (what an import loads, how a launcher finds its processes), use `subprocess`.
Rank processes of the suite come from there, too: a pool costs its ranks, and no import.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).parents[1]
_START = "import sys; sys.path.insert(0, sys.argv[1]); from suite.warm_server import main; main(int(sys.argv[2]))"

_lock = threading.Lock()
_channels: dict[int, socket.socket] = {}
"""The way to the warm process of this one; one that was forked has another number, and needs a way of its own."""
_started: list[subprocess.Popen[bytes]] = []


class Popen(subprocess.Popen[Any]):
    """A Python command that was forked; everything else is as in `subprocess`."""

    _report: int

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:  # noqa: ANN401
        executable, _, _, pass_fds, folder, environment, _, _, shell, *pipes = rest
        reading, in_write, out_read, writing, error_read, error_writing, *_, session, _ = pipes
        assert args[0] == sys.executable, f"a command of this Python: {args}"
        assert executable is None, "no other executable"
        assert not shell, "no shell"
        ends = {0: reading, 1: writing, 2: error_writing}
        given = {number: number if end == -1 else end for number, end in ends.items()}
        given |= {each: each for each in pass_fds}
        self._report, report = os.pipe()
        request = {
            "arguments": [os.fspath(each) for each in args[1:]],
            "environment": dict(os.environ if environment is None else environment),
            "folder": os.fspath(folder or os.getcwd()),
            "descriptors": list(given),
            "parent": os.getpid(),
            "session": session,
        }
        try:
            _ask(request, [report, *given.values()])
        finally:
            os.close(report)
            for number, end in ends.items():
                # Ends that this call has made for the child; others belong to who passed them.
                if end != -1 and (in_write, out_read, error_read)[number] != -1:
                    os.close(end)
        self._child_created = True
        self.pid = int(self._line() or 0)
        if not self.pid:
            raise OSError("the warm process has ended")

    def _line(self) -> bytes:
        """Return the next line of the report; none where it ends."""
        text = b""
        while not text.endswith(b"\n") and (each := os.read(self._report, 1)):
            text += each
        return text

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        if self.returncode is None:
            self._look(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None and not self._look(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def _look(self, timeout: float | None) -> bool:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is not None:
                return True
            if not select.select([self._report], [], [], timeout)[0]:
                return False
            # Where the warm process was killed, nobody knows how it ended.
            self.returncode = int(self._line() or -9)
            os.close(self._report)
            return True


def run(command: Sequence[str], *, timeout: float | None = None, check: bool = False, **options: Any) -> Any:  # noqa: ANN401
    """Do as `subprocess.run` does."""
    text = options.pop("input", None)
    if text is not None:
        options["stdin"] = subprocess.PIPE
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(text, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def connect(channel: socket.socket) -> None:
    """Take a warm process for this process's own, and have its rank processes come from it."""
    _channels[os.getpid()] = channel
    use_for_ranks()


def use_for_ranks() -> None:
    """Have the rank processes of this process come from its warm process."""
    from autopar.ranks import fork_server, supervisor

    for each in (fork_server, supervisor):
        each.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Popen})  # type: ignore[attr-defined]


def close() -> None:
    """End this process's warm process, if it has started one, and wait until it is gone."""
    if _started:
        _channels.pop(os.getpid()).close()
        _started.pop().wait()


def _ask(request: Mapping[str, object], descriptors: Sequence[int]) -> None:
    with _lock:
        if os.getpid() not in _channels:
            _channels[os.getpid()] = _start()
        socket.send_fds(_channels[os.getpid()], [json.dumps(request).encode()], list(descriptors))


def _start() -> socket.socket:
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", _START, str(TESTS), str(other.fileno())]
    options = {"pass_fds": [other.fileno()], "stdin": subprocess.DEVNULL, "start_new_session": True}
    _started.append(subprocess.Popen(command, cwd=TESTS, **options))  # type: ignore[call-overload]
    other.close()
    return mine
