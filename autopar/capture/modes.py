"""Modes: which modules were given in evaluation mode, and are put into training mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

from torch import nn

from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel

_Capture = Callable[[UserModel, nn.Module], LayerGraph]
MOST_NAMED = 5


def noting_modes(capture: _Capture) -> _Capture:
    """Return the same capture, whose graph notes which modules it has put into training mode."""

    @wraps(capture)
    def noting(model: UserModel, module: nn.Module) -> LayerGraph:
        before = [(path, part) for path, part in module.named_modules() if not part.training]
        graph = capture(model, module)
        # Some keep their mode, by a train() of their own.
        put_back = [path for path, part in before if part.training]
        return replace(graph, notes=(_note(put_back), *graph.notes)) if put_back else graph

    return noting


def _note(paths: list[str]) -> str:
    held = set(paths)
    highest = [path for path in paths if not path or path.rpartition(".")[0] not in held]
    if "" in held:
        named = "the model was"
    else:
        more = [f"{len(highest) - MOST_NAMED} more"] if len(highest) > MOST_NAMED else []
        named = f"{', '.join(highest[:MOST_NAMED] + more)} {'were' if len(highest) > 1 else 'was'}"
    return f"{named} in evaluation mode (eval()); training puts all modules into training mode, as train() does"
