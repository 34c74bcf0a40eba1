"""Schedules: every schedule and every weight policy, by the docstrings of their modules."""

from __future__ import annotations

import inspect
import sys

from autopar import policies, schedules
from autopar.formats.stage import LAYOUTS
from autopar.policies import POLICIES
from autopar.schedules import SCHEDULES, TORCH_NAMES, check
from reference_pages.text import markdown, page, table

_LAYOUTS = {"line": "1", "loop": "several, in a loop", "vee": "2, to and fro"}
_INTRODUCTION = """
```bash
autopar plan --gpus 4 --schedule zb-h1
autopar plan --gpus 4 --policy stash
```

A schedule orders what every rank computes in a step. A weight policy says which weights forwards and backwards see
where a pipeline is never flushed. A timetable reads like this: `F2` is the forward of micro-batch 2, `B2` its backward,
`I2` and `W2` the backward's halves, and `@1` the stage; a dot is a slot in which the rank waits.
"""


def schedules_page() -> str:
    """Return the page of schedules and weight policies."""
    rows = []
    for name, schedule in SCHEDULES.items():
        torch_names = ", ".join(f"`{each}`" for each, own in TORCH_NAMES.items() if own == name)
        halves = "in halves, some or all" if schedule.halves else "whole"
        rows.append([f"[`{name}`](#{name})", _LAYOUTS[LAYOUTS[name]], halves, torch_names])
    header = ["`--schedule`", "stages per group of devices", "backwards", "torch's name"]
    parts, modules = [], set[str]()
    for name, schedule in SCHEDULES.items():
        # A module that several schedules share is told of with the first.
        shared = "" if schedule.order.__module__ in modules else f"{_module(schedule.order)}\n\n"
        modules.add(schedule.order.__module__)
        parts.append(f"## {name}\n\n{shared}{markdown(schedule.order.__doc__)}")
    programs = f"## Programs as files\n\n{markdown(check.__doc__)}"
    rules = f"## Weight policies\n\n{markdown(policies.__doc__)}"
    parts += [programs, rules, *(f"### {name}\n\n{markdown(type(each).__doc__)}" for name, each in POLICIES.items())]
    said = markdown(schedules.__doc__)
    return page(
        "Schedules", "the docstrings of schedules and policies", _INTRODUCTION, table(header, rows), said, *parts
    )


def _module(value: object) -> str:
    return markdown(inspect.getdoc(sys.modules[value.__module__]))  # type: ignore[attr-defined]
