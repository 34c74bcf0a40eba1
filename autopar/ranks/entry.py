"""Entry: the main loop of a rank's process, ``python -m autopar.ranks.entry``.

It reads jobs as JSON lines from standard input and answers on a pipe; when its input closes, or its parent dies, it
ends. Nothing that crosses is a pickle.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve jobs until standard input closes."""
    settings = json.loads(sys.argv[1])
    die_with(int(settings["parent"]))
    # An interrupt of this process alone ends it as any signal does, without a traceback; its parent says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # User code may print; the parent's standard output is for results alone.
    os.dup2(2, 1)
    faulthandler.enable()
    import torch

    from autopar.ranks.allocator import keep_pages

    keep_pages()
    torch.set_num_threads(int(settings["threads"]))
    with os.fdopen(int(settings["pipe"]), "w", encoding="utf-8", buffering=1) as pipe:
        _send(pipe, {"ready": True})
        for line in sys.stdin:
            _serve(json.loads(line), pipe)
            # What a job leaves behind in cycles holds its groups of ranks, each with threads and sockets.
            gc.collect()


def _serve(job: dict[str, object], pipe: object) -> None:
    from autopar.ranks.board import FINISHED, SETTING_UP, Board
    from autopar.ranks.context import join_ranks
    from autopar.ranks.failure import Failure

    rank, size = int(str(job["rank"])), int(str(job["size"]))
    with Board(Path(str(job["board"])), size) as board:
        board.write(rank, SETTING_UP)

        def report(message: dict[str, object]) -> None:
            _send(pipe, {"message": message})

        try:
            module, _, function = str(job["target"]).partition(":")
            target = getattr(importlib.import_module(module), function)
            place = (str(job["rendezvous"]), str(job["device"]), float(str(job["timeout_s"])))
            with join_ranks(rank, size, *place, board, report, bool(job["share_gpus"])) as context:
                try:
                    result = target(context, job["arguments"])
                except Exception as error:
                    # Said before the group is left: leaving it may take as long as the peers let it.
                    _send(pipe, {"failure": Failure.of(error).as_dict()})
                    raise
            board.write(rank, FINISHED)
            _send(pipe, {"result": result})
        except Exception as error:
            _send(pipe, {"failure": Failure.of(error).as_dict()})


def _send(pipe: object, message: dict[str, object]) -> None:
    assert hasattr(pipe, "write")
    pipe.write(json.dumps(message) + "\n")


def die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    main()
