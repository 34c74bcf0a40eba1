"""Python: every public function and class of `import autopar`, what functions return, and the errors they raise."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import autopar
from autopar import errors
from autopar.api.exports import Export
from autopar.api.views import View
from autopar.formats.checkpoint import CheckpointView
from autopar.formats.contest import Contestant, ContestResult, ContestRow
from autopar.formats.report import Difference, Verification
from autopar.interop.target import DictatedStages
from autopar.options.contest import ContestOptions
from autopar.options.option import OPTIONS_HEAD, OptionField, options_of
from autopar.options.plan import PlanOptions
from autopar.options.profile import ProfileOptions
from autopar.options.train import RunOptions
from autopar.runtime.metrics import Metrics
from autopar.runtime.outcome import Outcome
from autopar.runtime.rehearsal.steps import Rehearsal
from autopar.runtime.start.script import ScriptJob
from reference_pages.commands import FUNCTIONS
from reference_pages.text import annotation, field_docstrings, inline, markdown, page, signature, table

TOPICS = {
    "Measure": ("profile", "estimate", "links", "probe", "environment"),
    "Plan": ("plan", "compare", "compare_runs", "simulate", "rehearse"),
    "Train": ("train", "verify", "materialize", "recalibrate"),
    "Checkpoints": ("checkpoints", "export_checkpoint"),
    "Show and export": ("show", "export"),
    "Import": ("import_profiles", "import_layout", "import_torchtitan", "import_pipedream"),
}
"""Functions by heading; every public one is under one."""
CLASSES = (
    autopar.Profile,
    autopar.Cluster,
    autopar.Plan,
    autopar.Timeline,
    autopar.Report,
    autopar.Comparison,
    autopar.RunComparison,
)
RETURNED = (
    ScriptJob,
    Metrics,
    Outcome,
    Rehearsal,
    Verification,
    Difference,
    View,
    Export,
    DictatedStages,
    CheckpointView,
    ContestRow,
    Contestant,
    ContestResult,
)
"""What functions return, beside those."""
OPTIONS = (PlanOptions, ProfileOptions, RunOptions, ContestOptions)
"""What functions take by name."""
_INTRODUCTION = """
```python
import autopar

profile = autopar.profile("gpt.py", 64)
plan = autopar.plan(profile, gpus=4)
print(plan.explain())
```

There is a function for every command. Functions return what commands print or write, and write nothing but what you
name. `import autopar` imports no torch, and neither does planning. Files may stand for what is in them: a path for a
plan, a profile or a cluster, and a cluster's name for the cluster. Messages name arguments as you pass them, such as
`` `gpus=8` ``, where the command line says `--gpus 8`. Examples run in a folder that holds the files which they name.
"""


def python_page() -> str:
    """Return the page of the library."""
    parts = [_INTRODUCTION, _index()]
    for topic, names in TOPICS.items():
        parts += [f"## {topic}", *(_function(name) for name in names)]
    parts += ["## Options", *(_fields(kind) for kind in OPTIONS)]
    parts += ["## Objects", *(_kind(kind, autopar_name=True) for kind in CLASSES)]
    parts += ["## Results", *(_kind(kind) for kind in RETURNED)]
    parts += ["## Errors", markdown(errors.__doc__)]
    return page("Python", "`autopar/api/` and what it returns", *parts)


def _index() -> str:
    commands = {name: command for command, names in reversed(FUNCTIONS.items()) for name in names}
    every = [name for names in TOPICS.values() for name in names]
    rows = ([f"[`{each}`](#{_anchor(each)})", f"`{commands[each]}`" if each in commands else ""] for each in every)
    return table(["function", "command"], rows)


def _anchor(function: str) -> str:
    return f"autopar{function}"


def _function(name: str) -> str:
    value = getattr(autopar, name)
    # Options have tables of their own.
    said = value.__doc__.partition(OPTIONS_HEAD)[0]
    return "\n\n".join((f"### autopar.{name}", signature(f"autopar.{name}", value, own=True), markdown(said)))


def _kind(kind: type, *, autopar_name: bool = False) -> str:
    name = f"autopar.{kind.__name__}" if autopar_name else kind.__name__
    parts = [f"### {name}", markdown(kind.__doc__)]
    fields = _own_fields(kind)
    if fields and not autopar_name:
        parts.append(table(["field", "type", "meaning"], fields))
    parts += [_member(kind, each, member) for each, member in _members(kind)]
    return "\n\n".join(parts)


def _fields(kind: type) -> str:
    every = options_of(kind).values()
    rows = ([f"`{each.name}`", f"`{_type(each)}`", f"`{each.default!r}`", inline(each.option.help)] for each in every)
    header = ["option", "type", "default", "meaning"]
    return "\n\n".join((f"### {kind.__name__}", markdown(kind.__doc__), table(header, rows)))


def _type(option: OptionField) -> str:
    """Return what an option is: a type, without the module that it is from, or its choices."""
    choices = " | ".join(map(repr, option.choices))
    if option.choices:
        return f"int | {choices}" if option.is_number else choices
    return re.sub(r"\b\w+\.", "", annotation(option.kind))


def _own_fields(kind: type) -> list[list[str]]:
    return [[f"`{name}`", f"`{hint}`", said] for name, (hint, said) in field_docstrings(kind).items() if name[0] != "_"]


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield public methods and properties of a class and of those above it, pydantic's left out, that have words."""
    seen: set[str] = set()
    for each in kind.__mro__:
        if not each.__module__.startswith("autopar.") or each.__name__ in ("Record", "SparseRecord"):
            continue
        for name, member in vars(each).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            wanted = name[0] != "_" and name not in seen and inspect.isfunction(function)
            if wanted and function.__doc__ and not hasattr(member, "decorator_info"):
                seen.add(name)
                yield name, member


def _member(kind: type, name: str, member: Any) -> str:  # noqa: ANN401
    if isinstance(member, property):
        return f"`.{name}`: {markdown(member.__doc__)}"
    function = getattr(member, "__func__", member)
    before = kind.__name__ if isinstance(member, classmethod) else ""
    return f"{signature(f'{before}.{name}', function)}\n\n{markdown(function.__doc__)}"
