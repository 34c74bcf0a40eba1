"""The model that a function of the API is given: a module of a script, or a model file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from autopar.capture import UserModel


def user_model(
    model: nn.Module | str | Path,
    batch: object,
    functions: dict[str, Callable[..., Any] | None],
    ignored_state: tuple[str, ...],
    data: str | Path | None,
    sequence: int | None,
) -> tuple[UserModel, int]:
    """Return the model that is profiled, from a file or of a script, and the samples of a step."""
    if not isinstance(model, str | Path):
        _check_absent(None, data=data, sequence=sequence)
        from autopar.capture.losses import copied_model

        return copied_model(model, batch, ignored_state, **functions)
    _check_absent(model, **functions, ignored_state=ignored_state or None)
    if not isinstance(batch, int):
        raise UsageError(
            f"profile() takes the samples of a step as batch, for a model in a file; found {type(batch).__name__}"
        )
    from autopar.capture import load

    return load(str(model), None if data is None else str(data), sequence=sequence), batch


def _check_absent(file: str | Path | None, **arguments: object) -> None:
    """Refuse what a model in a file says itself, or, of a module, what only files have."""
    for name, value in arguments.items():
        if value is not None and file is not None:
            raise UsageError(f"profile() takes no {name} for {file}: a model file has its own")
        if value is not None:
            raise UsageError(f"profile() takes {name} for models in files only; a module's inputs are those of batch")
