"""The process in which a page's Python blocks run: a block a line on standard input, its result a line back.

Names live on from block to block, as in a session of Python.
"""

import json
import linecache
import os
import sys
import traceback
import types
from contextlib import redirect_stdout
from io import StringIO
from typing import TextIO


def serve(requests: TextIO, replies: TextIO) -> None:
    """Run every block that is asked for."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.path.insert(0, "")
    for line in requests:
        asked = json.loads(line)
        replies.write(json.dumps(_run(asked["text"], asked["name"], asked["line"], vars(module))) + "\n")
        replies.flush()


def _run(text: str, name: str, line: int, names: dict[str, object]) -> dict[str, object]:
    """Run a block whose lines are counted as the page's; return what it printed, and its error with its line."""
    source = "\n" * (line - 1) + text
    # Where the source of a class of the block is looked up. No time: it is no file that may have changed.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    with redirect_stdout(StringIO()) as printed:
        try:
            exec(compile(source, name, "exec"), names)
        except BaseException as error:
            frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
            said = "".join(traceback.format_exception_only(error))
            at = error.lineno if isinstance(error, SyntaxError) else frames[0] if frames else line
            return {"output": printed.getvalue(), "error": said, "line": at, "trace": traceback.format_exc()}
    return {"output": printed.getvalue(), "error": None}


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)
        serve(sys.stdin, channel)
