"""The settings that a user's optimizer gives each parameter, as plain data that can be compared."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from autopar.capture.source import NamedParameters, UserModel

Settings = dict[str, list[dict[str, Any]]]
"""By parameter, in the first steps one after the other; one that the optimizer leaves out is not there."""

AHEAD = 8
"""Steps of a scheduler that are looked at."""
_NOT_SETTINGS = {"params", "param_names"}


def settings_of(user: UserModel, named: NamedParameters) -> Settings:
    """Return what an optimizer of these parameters, made for this purpose alone, gives each of them.

    Raises:
        ModelError: ``optimizer()`` or ``scheduler()`` raises.
    """
    optimizer = user.make_optimizer(named)
    scheduler = user.make_scheduler(optimizer)
    names = {id(parameter): name for name, parameter in named}
    found: Settings = {}
    _note(found, optimizer, names)
    if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
        for _ in range(AHEAD):
            try:
                with warnings.catch_warnings():
                    # Nothing has been stepped, and nothing will be.
                    warnings.simplefilter("ignore")
                    scheduler.step()
            except Exception:
                # It has an end, or wants to be told something.
                break
            _note(found, optimizer, names)
    return found


def _note(found: Settings, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    for group in optimizer.param_groups:
        settings = {str(key): _plain(value) for key, value in group.items() if key not in _NOT_SETTINGS}
        # As it is read from a file.
        settings = json.loads(json.dumps(settings))
        for parameter in group["params"]:
            if id(parameter) in names:
                found.setdefault(names[id(parameter)], []).append(settings)


def _plain(value: object) -> object:
    """Return a value as numbers, texts, lists and dicts; of anything else its name."""
    if isinstance(value, float):
        return repr(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Iterable):
        return [_plain(each) for each in value]
    if hasattr(value, "__qualname__"):
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        known = [_plain(each) for each in cells if isinstance(each, bool | int | float | str)]
        return [f"{getattr(value, '__module__', None)}.{value.__qualname__}", *known]
    return type(value).__qualname__
