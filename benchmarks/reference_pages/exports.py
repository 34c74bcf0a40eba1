"""Exports: every trainer that plans are exported to, and every system whose files are imported, by their docstrings."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

from autopar.api.exports import TARGETS
from autopar.hardware import kinds
from autopar.interop import megatron, pipedream
from autopar.interop.target import Target
from autopar.planner.objectives import nearest
from reference_pages.text import body, inline, markdown, page, table

IMPORTS: dict[str, ModuleType] = {"profiles": kinds, "pipedream": pipedream, "layout": megatron}
_INTRODUCTION = """
```bash
autopar export torchtitan plan.json --nearest
autopar import layout "Et|tttL"
```

[Export a plan](../howto/export.md) and [import profiles and stages](../howto/import.md) say how these are used. `make
exports` has the trainers read the files, in an environment of theirs with pinned versions, and records what they say
([results](../../benchmarks/results/exports.json)). There is no GPU in that: nothing is trained but by torch. Of 200
random plans with equal widths, stages that are exported to Megatron-LM or torchtitan and imported again are the same.
"""


def exports_page() -> str:
    """Return the page of other systems."""
    rows, parts = [], []
    for name, target in TARGETS.items():
        rows.append([f"[`{name}`](#{name})", f"`{target.file}`", target.version, inline(target.trial)])
        parts.append(f"## {name}\n\n{_said_of(target)}")
    parts.append(f"## --nearest\n\n{markdown(nearest.__doc__)}")
    parts += [f"## import {name}\n\n{markdown(module.__doc__)}" for name, module in IMPORTS.items()]
    index = table(["format", "main file", "written for", "tried"], rows)
    return page("Other trainers and systems", "the docstrings in `autopar/interop/`", _INTRODUCTION, index, *parts)


def _said_of(target: Target) -> str:
    """Return the docstring of a format's module, or of the function that writes it where a module has several."""
    module = target.write.__module__
    alone = sum(each.write.__module__ == module for each in TARGETS.values()) == 1
    return body(sys.modules[module].__doc__) if alone else markdown(inspect.getdoc(target.write))
