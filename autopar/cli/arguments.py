"""Commands: how each becomes part of the command line, what those that plan have in common, and their flags.

Errors and notes of the library name arguments as Python has them; here they become flags. Every command has `--quiet`,
and examples in its help.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from autopar.cli.mistakes import Commands
from autopar.cli.output import quietly
from autopar.cli.settings import echo_settings
from autopar.errors import UsageError
from autopar.options.contest import ContestOptions
from autopar.options.option import READERS, OptionField, Options, options_of
from autopar.options.plan import PlanOptions
from autopar.options.profile import ProfileOptions
from autopar.options.rehearse import RehearsalOptions
from autopar.options.train import RunOptions
from autopar.ranks.environment import is_launched, is_supervised, rank_from_environment

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.formats.cluster import Cluster
    from autopar.formats.plan import Plan
    from autopar.formats.prediction import Alternative
    from autopar.formats.profile import Profile
    from autopar.formats.report import Report

    Noted = TypeVar("Noted", Plan, Profile, Report)


_KINDS = (RehearsalOptions, ProfileOptions, ContestOptions, PlanOptions, RunOptions)
OPTIONS = {name: each for kind in _KINDS for name, each in options_of(kind).items()}
_OWN = {"largest_bytes": "--largest"}
ARGUMENTS = {name: each.flag for name, each in OPTIONS.items() if each.option.is_typed} | {
    name: _OWN.get(name, f"--{name.replace('_', '-')}")
    for name in (
        *("cluster", "largest_bytes", "nearest", "over", "overwrite", "pipeline_size", "profile", "profiled_batch"),
        *("png", "ranks", "replicas", "run", "schedule_file", "trace"),
    )
}
"""Arguments that are options of some command, too, with their flags."""


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
    if not names or not ARGUMENTS.keys() >= set(names):
        return None
    values = ["" for _ in found.args] + [_value(call, each.value) for each in found.keywords]
    flags = (ARGUMENTS[name] for name in names)
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


def offering(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what completes one of some names."""

    def complete(incomplete: str) -> list[str]:
        return _beginning(incomplete, names)

    return complete


def schedules(incomplete: str) -> list[str]:
    """Return the schedules that ``--schedule`` takes; torch's names where one is begun.

    >>> schedules("zb"), schedules("Inter")
    (['zb-h1', 'zb-h2', 'zb-v'], ['Interleaved1F1B'])
    """
    from autopar.schedules import SCHEDULES, TORCH_NAMES

    return _beginning(incomplete, ("auto", *SCHEDULES)) or _beginning(incomplete, TORCH_NAMES)


def clusters(incomplete: str) -> list[str]:
    """Return names of clusters; a shell offers files where none begins so."""
    from autopar.hardware.clusters import EXAMPLES

    return _beginning(incomplete, EXAMPLES) if incomplete else []


def devices(incomplete: str) -> list[str]:
    """Return what ``profile --device`` takes."""
    from autopar.hardware.gpus import GPUS

    return _beginning(incomplete, ("auto", "cpu", "cuda", *(gpu.name for gpu in GPUS)))


def targets(incomplete: str) -> list[str]:
    """Return what `autopar export` writes."""
    from autopar.api.exports import TARGETS

    return _beginning(incomplete, TARGETS)


_COMPLETIONS = {"device": devices, "schedule": schedules}


def _option_info(option: OptionField, text: str | None = None) -> OptionInfo:
    """Return what the command line has of an option; ``text`` takes the place of what the option says."""
    values = "|".join(("N", *option.choices) if option.is_number and option.choices else option.choices)
    found: OptionInfo = typer.Option(
        option.flag,
        help=as_flags(option.option.help if text is None else text),
        metavar=option.option.unit.upper() or (values if 0 < len(values) <= _WIDEST else None),
        autocompletion=_COMPLETIONS.get(option.name) or (offering(option.choices) if option.choices else None),
        rich_help_panel=option.option.group or None,
    )
    return found


PLANNED_FILE, PROFILED_FILE = Path("plan.json"), Path("profile.json")
ProfileFile = Annotated[Path, typer.Argument(help="What `autopar profile` measured.")]
PlanFile = Annotated[Path, typer.Argument(help="What `autopar plan` wrote.")]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Devices and links: a .json or .toml file, or a name such as 4x8xA100-80G:200Gbps "
        "(`autopar cluster list`); default: cluster.json beside the profile, else estimated.",
        autocompletion=clusters,
    ),
]
ClusterNames = Annotated[
    list[str] | None,
    typer.Option(
        "--cluster",
        help="Devices and links: a .json or .toml file, or a name such as 4x8xA100-80G:200Gbps "
        "(`autopar cluster list`); default: cluster.json beside the profile, else estimated. Repeated, it plans "
        "for each and shows the plans side by side.",
        autocompletion=clusters,
    ),
]
OtherProfile = Annotated[Path | None, typer.Option(help="Profile to use in place of the one the plan records.")]
OtherCluster = Annotated[
    str | None, typer.Option(help="Cluster, a file or a name, to use in place of the one the plan records.")
]
TimesOf = Annotated[str | None, _option_info(OPTIONS["times_of"])]
ProgramFile = Annotated[Path | None, _option_info(OPTIONS["program"])]
Timeout = Annotated[float, _option_info(OPTIONS["timeout_s"])]
_OUTPUT, _WIDEST = "Output", 20
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.", rich_help_panel=_OUTPUT)]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="No progress, tables and notes; only errors, and the result with --json.",
        rich_help_panel=_OUTPUT,
    ),
]


def output_option(help: str, *flags: str) -> OptionInfo:  # noqa: A002
    """Return an option that says where something is written; `--output` where no other flags are named."""
    found: OptionInfo = typer.Option(*(flags or ("--output", "-o")), help=help, rich_help_panel=_OUTPUT)
    return found


def json_option(what: str) -> OptionInfo:
    """Return the option that puts a command's result on standard output."""
    return output_option(f"Put {what} on stdout as JSON.", "--json")


class Only(NamedTuple):
    """Beside a class of options: which of them a command has."""

    names: tuple[str, ...]
    help: Mapping[str, str] = {}
    """What help says of some in place of what the option says."""


def echo(cluster_name: str | None, cluster: Cluster, console: Console) -> None:
    """Print in a line what was understood of ``--cluster``; nothing where none was named."""
    from autopar.hardware.clusters import is_file
    from autopar.hardware.collectives import NETWORK_SHARE
    from autopar.report.inputs import cluster_summary

    if cluster_name is not None:
        published = not is_file(cluster_name) or Path(cluster_name).suffix == ".toml"
        said = cluster_summary(cluster, NETWORK_SHARE if published else 1.0)
        console.print(f"cluster {cluster_name}: {said}", highlight=False, markup=False, soft_wrap=True)


def examples(*lines: str) -> str:
    """Return what the help of a command ends with."""
    return "\n\n".join((f"Example{'s' if len(lines) > 1 else ''}:", *lines))


def group(help: str, example: str) -> typer.Typer:  # noqa: A002
    """Return what has commands of its own, and an example in its help."""
    settings = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(
        help=help, cls=Commands, epilog=examples(example), no_args_is_help=True, context_settings=settings
    )


def add(
    app: typer.Typer,
    name: str,
    act: Callable[..., None],
    *example_lines: str,
    of_ranks: bool = False,
    refusing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Let ``app`` have a command that does what ``act`` does, with ``example_lines`` as the examples in its help.

    A launcher starts one ``of_ranks`` once for each; arguments are read in the context that ``refusing`` returns.
    """
    app.command(name, cls=_Command, epilog=examples(*example_lines))(_command(act, of_ranks, refusing))


class _Command(TyperCommand):
    """A command that takes options without a value, where one is meant then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Read what was typed."""
        return super().parse_args(ctx, list(with_values(args)))


def with_values(arguments: Sequence[str]) -> Iterator[str]:
    """Yield arguments, with the value that is meant behind an option that has none.

    >>> [*with_values(["--sequence-parallel", "--quiet"])], [*with_values(["--sequence-parallel", "off"])]
    (['--sequence-parallel', 'on', '--quiet'], ['--sequence-parallel', 'off'])
    """
    bare = {each.flag: each for each in OPTIONS.values() if each.option.bare}
    for at, argument in enumerate(arguments):
        yield argument
        known = bare.get(argument)
        if known is not None and arguments[at + 1 : at + 2] not in [[choice] for choice in known.choices]:
            yield known.option.bare


def _leads() -> bool:
    """Whether this is the rank that speaks for all, or no rank."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return not is_launched(os.environ) or rank_from_environment(os.environ).rank == 0


@contextmanager
def _said_by_one() -> Iterator[None]:
    """Let one of the ranks that a launcher has started say what is wrong with the command line, which all find."""
    try:
        yield
    except UsageError:
        if _leads():
            raise
        raise typer.Exit(UsageError.exit_code) from None


def _command(
    act: Callable[..., None], of_ranks: bool, refusing: Callable[[], AbstractContextManager[None]]
) -> Callable[..., None]:
    """Return a command with the parameters of ``act``, the options of its classes of options, and `--quiet`."""
    hints = get_type_hints(act, include_extras=True)
    parts = {name: _part(name, each.default, hints[name]) for name, each in inspect.signature(act).parameters.items()}

    def command(context: typer.Context, quiet: bool, **typed: object) -> None:
        with quietly() if quiet else nullcontext(), _said_by_one() if of_ranks else nullcontext():
            if not of_ranks or (_leads() and not is_supervised(os.environ)):
                echo_settings(context)
            with refusing():
                arguments = {name: part.make(typed) for name, part in parts.items()}
            act(**arguments)

    shown = chain.from_iterable(part.parameters for part in parts.values())
    more = (_parameter("context", inspect.Parameter.empty, typer.Context), _parameter("quiet", False, Quiet))
    command.__signature__ = inspect.Signature([*shown, *more])  # type: ignore[attr-defined]
    command.__doc__ = act.__doc__
    return command


class _Part(NamedTuple):
    """An argument of a function, or a field of a class: how it is made, and what is typed for it."""

    make: Callable[[Mapping[str, object]], object]
    """Takes what was typed, by the names of parameters."""
    parameters: tuple[inspect.Parameter, ...]


def _part(name: str, default: object, hint: Any) -> _Part:  # noqa: ANN401
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if not (isinstance(kind, type) and issubclass(kind, Options)):
        return _Part(lambda typed: typed[name], (_parameter(name, default, hint),))
    hints, known = get_type_hints(kind, include_extras=True), options_of(kind)
    only = next((each for each in extras if isinstance(each, Only)), Only(tuple(known)))
    typed = {name: each for name, each in known.items() if each.option.is_typed and name in only.names}
    parts = {name: _option(each, only.help.get(name)) for name, each in typed.items()}
    parts |= {
        each.name: _part(each.name, each.default, hints[each.name])
        for each in fields(kind)
        if get_origin(hints[each.name]) is Annotated
    }
    shown = tuple(chain.from_iterable(part.parameters for part in parts.values()))
    return _Part(lambda typed: kind(**{name: part.make(typed) for name, part in parts.items()}), shown)


def _option(option: OptionField, text: str | None) -> _Part:
    """Return what is typed for an option, which is read as the library reads it."""
    kind, default = option.kind, option.default
    if get_origin(kind) is tuple:
        kind, default = list[str], None
    elif option.choices or option.option.unit in READERS:
        kind = str
    hint = Annotated[kind | None if default is None else kind, _option_info(option, text)]  # type: ignore[valid-type]
    return _Part(lambda typed: option.read(typed[option.name]), (_parameter(option.name, default, hint),))


def _parameter(name: str, default: object, hint: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
