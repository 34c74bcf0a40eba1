"""Commands: how each becomes part of the command line, what those that plan have in common, and their flags.

Errors and notes of the library name arguments as Python has them; here they become flags. Every command has `--quiet`,
and examples in its help.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, get_type_hints

import typer

from autopar.cli.output import quietly

if TYPE_CHECKING:
    from autopar.formats.plan import Plan
    from autopar.formats.prediction import Alternative
    from autopar.formats.profile import Profile
    from autopar.formats.report import Report

    Noted = TypeVar("Noted", Plan, Profile, Report)
    from rich.console import Console

    from autopar.formats.cluster import Cluster


_OWN = {
    "budget_s": "budget",
    "bytes_per_s": "bandwidth",
    "deadline_s": "deadline",
    "largest_bytes": "largest",
    "memory_bytes": "memory",
    "timeout_s": "timeout",
}
"""Flags that are not called like their arguments, which have units."""
FLAGS_OF_ARGUMENTS = {flag: argument for argument, flag in _OWN.items()}
"""Arguments by these flags."""
ARGUMENTS = frozenset(
    (
        *("accept_changes", "accept_loss", "batch", "calibrate_with", "checkpoint", "chunks", "clip", "clip_norm"),
        *("cluster", "compile", "cpu_offload", "data", "deferred_batch_norm", "device", "divisible"),
        *("effort", "epochs", "equal_widths", "every", "exact", "forbid_cut", "gap", "gpus", "inject_fault"),
        *("last", "max_stages", "micro_batches", "min_stages", "objective", "over", "overwrite", "pin"),
        *("policy", "anneal_steps", "synchronous_steps", "ahead", "across_nodes", "sequence_parallel"),
        *("precision", "profile", "profiled_batch", "program", "ranks", "real_time", "recompute"),
        *("replicate_state", "resume", "save", "schedule", "seed", "sequence", "shard", "share_gpus"),
        *(
            "solver",
            "solver_seconds",
            "split_seeds",
            "stages",
            "steps",
            "sync_batch_norm",
            "threads",
            "times_of",
            "use_all",
        ),
        *("weights", "replicas", "pipeline_size", "schedule_file", "nearest"),
        *_OWN,
    )
)
"""Arguments that are options of some command, too."""


def as_flags(text: str) -> str:
    """Return a text with flags for the arguments that it names in backquotes.

    >>> as_flags("`gpus=4`: too few; a plan fits with `shard='auto', gpus=8`, or without `use_all`")
    '--gpus 4: too few; a plan fits with --shard auto --gpus 8, or without --use-all'
    >>> as_flags("`autopar plan` writes it; pass `exact=True`, or `pin='a,b same stage'`")
    "`autopar plan` writes it; pass --exact, or --pin 'a,b same stage'"
    """
    return re.sub("`([^`]+)`", lambda match: _flags_of(match[1]) or match[0], text)


def with_flags(record: Noted) -> Noted:
    """Return a record with flags in its notes."""
    return record.model_copy(update={"notes": tuple(map(as_flags, record.notes))})


def plan_with_flags(plan: Plan) -> Plan:
    """Return a plan with flags in its notes, and where it says what is against its alternatives."""
    alternatives = tuple(map(_alternative, plan.alternatives))
    return with_flags(plan.model_copy(update={"alternatives": alternatives}))


def _alternative(alternative: Alternative) -> Alternative:
    reasons = {"infeasible": alternative.infeasible, "excluded": alternative.excluded}
    return alternative.model_copy(update={name: each and as_flags(each) for name, each in reasons.items()})


def _flags_of(arguments: str) -> str | None:
    """Return the arguments of a call as they are typed; None where these are none."""
    call = f"call({arguments})"
    try:
        found = ast.parse(call, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(found, ast.Call):
        return None
    names = [each.id if isinstance(each, ast.Name) else "" for each in found.args]
    names += [each.arg or "" for each in found.keywords]
    if not names or not ARGUMENTS.issuperset(names):
        return None
    values = ["" for _ in found.args] + [_value(call, each.value) for each in found.keywords]
    flags = (f"--{_OWN.get(name, name).replace('_', '-')}" for name in names)
    return " ".join(f"{flag} {value}".rstrip() for flag, value in zip(flags, values, strict=True))


def _value(call: str, value: ast.expr) -> str:
    """Return a value as a shell takes it; nothing where its flag alone says it."""
    if isinstance(value, ast.Constant) and value.value is True:
        return ""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return shlex.quote(value.value)
    return ast.get_source_segment(call, value) or ""


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def schedules(incomplete: str) -> list[str]:
    """Return the schedules that ``--schedule`` takes; torch's names where one is begun.

    >>> schedules("zb"), schedules("Inter")
    (['zb-h1', 'zb-h2', 'zb-v'], ['Interleaved1F1B'])
    """
    from autopar.schedules import SCHEDULES, TORCH_NAMES

    return _beginning(incomplete, ("auto", *SCHEDULES)) or _beginning(incomplete, TORCH_NAMES)


def shards(incomplete: str) -> list[str]:
    """Return what replicas may divide."""
    from typing import get_args

    from autopar.formats.plan import Shard

    return _beginning(incomplete, ("auto", *get_args(Shard)))


def policies(incomplete: str) -> list[str]:
    """Return the weight policies that a plan may have."""
    from typing import get_args

    from autopar.formats.plan import WeightPolicy

    return _beginning(incomplete, get_args(WeightPolicy))


def objectives(incomplete: str) -> list[str]:
    """Return what a plan may be best at."""
    from typing import get_args

    from autopar.planner.options import Objective

    return _beginning(incomplete, get_args(Objective))


def solvers(incomplete: str) -> list[str]:
    """Return how plans are searched."""
    return _beginning(incomplete, ("dp", "milp"))


def recomputations(incomplete: str) -> list[str]:
    """Return which layers may run forward again."""
    return _beginning(incomplete, ("auto", "none", "full"))


def clusters(incomplete: str) -> list[str]:
    """Return names of clusters; a shell offers files where none begins so."""
    from autopar.hardware.clusters import EXAMPLES

    return _beginning(incomplete, EXAMPLES) if incomplete else []


def devices(incomplete: str) -> list[str]:
    """Return what ``profile --device`` takes."""
    from autopar.hardware.gpus import GPUS

    return _beginning(incomplete, ("auto", "cpu", "cuda", *(gpu.name for gpu in GPUS)))


def formats(incomplete: str) -> list[str]:
    """Return what `autopar import` reads."""
    return _beginning(incomplete, ("pipedream", "piper", "profiles", "layout", "torchtitan"))


def targets(incomplete: str) -> list[str]:
    """Return what `autopar export` writes."""
    from autopar.api.exports import TARGETS

    return _beginning(incomplete, TARGETS)


ProfileFile = Annotated[Path, typer.Argument(help="What `autopar profile` measured.")]
Gpus = Annotated[int | None, typer.Option("--gpus", help="Use at most this many devices; default: all of the cluster.")]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Devices and links: a .json or .toml file, or a name such as 4x8xA100-80G:200Gbps "
        "(`autopar cluster list`); default: cluster.json beside the profile, else estimated.",
        autocompletion=clusters,
    ),
]
InjectFault = Annotated[
    list[str] | None,
    typer.Option(
        "--inject-fault",
        help="A drill: KIND@RANK:STEP[:ACTION], such as kill@1:7 or nan@0:3:F; kinds are kill, stop, segfault, "
        "exception, exit, slow, nan, out-of-memory, disconnect, disk-full, fail-write, fail-fsync, fail-rename.",
    ),
]
Memory = Annotated[str | None, typer.Option("--memory", help="Limit per device, such as 16GiB.")]
Batch = Annotated[int | None, typer.Option("--batch", help="Samples per step; default: the profile's.")]
Bandwidth = Annotated[
    str | None, typer.Option("--bandwidth", help="Assume this bandwidth of every link, such as 25GB/s.")
]
ProgramFile = Annotated[
    Path | None,
    typer.Option(
        "--program",
        help="Program to take in place of the plan's own (`autopar simulate --write-program`), edited or not.",
    ),
]
TimesOf = Annotated[
    str | None,
    typer.Option(
        "--times-of",
        help="Let the profile's times of this kind of device, such as H100 or cpu, stand for kinds in the cluster that "
        "it has none of.",
    ),
]


def echo(cluster_name: str | None, cluster: Cluster, console: Console) -> None:
    """Print in a line what was understood of ``--cluster``; nothing where none was named."""
    from autopar.hardware.clusters import is_file
    from autopar.hardware.collectives import NETWORK_SHARE
    from autopar.report.inputs import cluster_summary

    if cluster_name is not None:
        published = not is_file(cluster_name) or Path(cluster_name).suffix == ".toml"
        said = cluster_summary(cluster, NETWORK_SHARE if published else 1.0)
        console.print(f"cluster {cluster_name}: {said}", highlight=False, markup=False, soft_wrap=True)


Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress, tables and notes; only errors, and the result with --json.")
]


def examples(*lines: str) -> str:
    """Return what the help of a command ends with."""
    return "\n\n".join((f"Example{'s' if len(lines) > 1 else ''}:", *lines))


def add(app: typer.Typer, name: str, act: Callable[..., None], *example_lines: str) -> None:
    """Let ``app`` have a command that does what ``act`` does, with ``example_lines`` as the examples in its help."""
    app.command(name, epilog=examples(*example_lines))(_with_quiet_option(act))


def _with_quiet_option(act: Callable[..., None]) -> Callable[..., None]:
    """Return a command with `--quiet` behind the parameters of ``act``."""

    def command(quiet: bool, **options: object) -> None:
        if not quiet:
            act(**options)
            return
        with quietly():
            act(**options)

    signature = inspect.signature(act)
    hints = get_type_hints(act, include_extras=True)
    parameters = [
        each.replace(annotation=hints.get(each.name, each.annotation)) for each in signature.parameters.values()
    ]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    own = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    command.__signature__ = signature.replace(parameters=[*parameters, own], return_annotation=None)  # type: ignore[attr-defined]
    command.__doc__ = act.__doc__
    return command
