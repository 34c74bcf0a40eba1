"""Commands between autopar and other systems: ``autopar export`` and ``autopar import``.

A plan in the words of another trainer; and profiles that another system, or other machines, measured, and other
trainers' stages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli import arguments
from autopar.cli.arguments import (
    PLANNED_FILE,
    OtherCluster,
    OtherProfile,
    Overwrite,
    PlanFile,
    as_flags,
    json_option,
    output_option,
)
from autopar.cli.output import say, screen
from autopar.errors import FileError, UsageError

if TYPE_CHECKING:
    from autopar.formats.profile import Profile
    from autopar.interop.target import DictatedStages


ExportFormat = Annotated[
    str,
    typer.Argument(
        metavar="FORMAT",
        help="torch: a schedule file of torch's pipelining, and its stages; torchtitan: a module of its configuration; "
        "megatron: Megatron-LM's arguments; deepspeed: its JSON, and a pipeline's parts; accelerate: its YAML; "
        "torchrun, slurm, kubernetes: the launch of autopar itself.",
        autocompletion=arguments.targets,
    ),
]
Output = Annotated[
    Path | None,
    output_option("Where to write the main file; others go beside it. Default: its own name."),
]
Nearest = Annotated[
    bool, typer.Option("--nearest", help="Where the trainer cannot express the plan, export the nearest that it can.")
]
ScheduleFile = Annotated[
    str | None,
    typer.Option(help="Of torchtitan: write the plan's own schedule, too, under this name, and have it read there."),
]


def export(
    target: ExportFormat,
    plan: PlanFile = PLANNED_FILE,
    output: Output = None,
    nearest: Nearest = False,
    schedule_file: ScheduleFile = None,
    profile: OtherProfile = None,
    cluster: OtherCluster = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a plan as the configuration of another trainer, or as the launch of autopar's own ranks."""
    from autopar.api.exports import target_of

    output = Path(target_of(target).file) if output is None else output
    options = {"nearest": nearest, "schedule_file": schedule_file, "profile": profile, "cluster": cluster}
    _export(target, plan, output, options, overwrite=overwrite)


def _export(target: str, plan: Path, output: Path, options: dict[str, Any], *, overwrite: bool) -> None:
    from autopar import api
    from autopar.cli.arguments import as_flags
    from autopar.cli.output import check_outputs, slow_phases
    from autopar.formats.document import write_text

    with slow_phases("planning") as progress:
        progress("looking at the plan", 0.0)
        made = api.export(plan, target, output=output, **options)
    paths = [output, *(output.parent / file.name for file in made.files[1:])]
    check_outputs(plan, (options["profile"], options["cluster"], None), paths, overwrite=overwrite)
    for path, file in zip(paths, made.files, strict=True):
        write_text(path, file.text)
    for note in made.notes:
        say(screen(), f"note: {as_flags(note)}")
    say(screen(), f"Written: {', '.join(map(str, paths))}")


_OUTPUT = Path("profile.json")
_KINDS = "profiles"
_STAGES = ("layout", "torchtitan")
_FORMATS = ("pipedream", _KINDS, *_STAGES)


ImportFormat = Annotated[
    str,
    typer.Argument(
        metavar="FORMAT",
        help="pipedream: the text graph of PipeDream and DAPPLE; profiles: autopar's own, of one "
        "model on several kinds of devices; layout: Megatron's text of stages, such as 'Et*7|t*9L'; torchtitan: the "
        "stages of its configuration.",
        autocompletion=arguments.formats,
    ),
]
Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="The file to read; of profiles, one for each kind; of layout, the text."),
]
ProfiledBatch = Annotated[
    int | None, typer.Option(help="Samples of the mini-batch that was profiled (pipedream); default: it counts as 1.")
]
OfProfile = Annotated[
    Path | None, typer.Option(help="Profile whose layers stages are of (layout, torchtitan); default: profile.json.")
]
Replicas = Annotated[
    int | None, typer.Option(help="Pipelines beside each other (layout: 1; torchtitan: as its file says).")
]
PipelineSize = Annotated[
    int | None, typer.Option(help="Devices of a pipeline (layout); default: as many as there are stages.")
]


def import_(
    system: ImportFormat,
    files: Files,
    profiled_batch: ProfiledBatch = None,
    profile: OfProfile = None,
    replicas: Replicas = None,
    pipeline_size: PipelineSize = None,
    output: Annotated[Path, output_option("Where to write the profile.")] = _OUTPUT,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, json_option("the profile, or the stages,")] = False,
) -> None:
    """Read another system's profile, or several of autopar's, as one profile; or another trainer's stages."""
    if system not in _FORMATS:
        raise UsageError(f"FORMAT must be one of {', '.join(_FORMATS)}; found {system!r}")
    if profiled_batch is not None and system != "pipedream":
        raise UsageError("--profiled-batch is for pipedream; leave it out")
    _check_count(system, files)
    if system in _STAGES:
        _say_stages(_read_stages(system, files[0], profile, replicas, pipeline_size), as_json)
        return
    for name, value in (("profile", profile), ("replicas", replicas), ("pipeline_size", pipeline_size)):
        if value is not None:
            raise UsageError(f"`{name}` is of {_STAGES[0]}; {system} has none")
    _import_profile(system, files, profiled_batch, output, overwrite=overwrite, as_json=as_json)


def _import_profile(
    system: str, files: list[Path], profiled_batch: int | None, output: Path, *, overwrite: bool, as_json: bool
) -> None:
    from autopar.cli.arguments import with_flags
    from autopar.cli.output import check_output
    from autopar.formats.references import rebase_paths

    for file in files:
        if not file.exists():
            wrote = "`autopar profile`" if system == _KINDS else system
            raise FileError(f"{file}: no such file; name one that {wrote} wrote")
    check_output(output, _OUTPUT, overwrite=overwrite, inputs=tuple(files))
    read = _read(system, files, profiled_batch)
    profile = with_flags(read.model_copy(update={"model": rebase_paths(read.model, files[0], output)}))
    profile.save(output)
    console = screen()
    for note in profile.notes:
        say(console, f"Note: {note}")
    say(console, f"Written: {output}, {_content(profile)}; `autopar plan {output}` plans for it")
    if as_json:
        sys.stdout.write(profile.dumps())


def _read_stages(
    system: str, file: Path, profile: Path | None, replicas: int | None, pipeline_size: int | None
) -> DictatedStages:
    from autopar import api

    measured = profile or _OUTPUT
    if system == "torchtitan":
        if pipeline_size is not None:
            raise UsageError(f"`pipeline_size` is what {file} says; leave it out")
        return api.import_torchtitan(file, measured, replicas=replicas)
    return api.import_layout(str(file), measured, replicas=replicas or 1, pipeline_size=pipeline_size)


def _say_stages(found: DictatedStages, as_json: bool) -> None:
    """Put the stages on standard output, and say what plans and compares them."""
    import json

    options = ", ".join(f"{name}={value!r}" for name, value in found.options.items())
    flags = as_flags(f"`{options}`")
    say(screen(), f"`autopar plan {flags}` plans them and says how far from the best they are, `autopar compare` too")
    sys.stdout.write(f"{json.dumps(found.options) if as_json else found.stages}\n")


def _check_count(system: str, files: list[Path]) -> None:
    if system == _KINDS and len(files) < 2:
        raise UsageError(f"{files[0]} is the only profile; name one for each kind of device")
    if system != _KINDS and len(files) > 1:
        raise UsageError(f"{files[1]} is a second file; {system} profiles are read one at a time")


def _content(profile: Profile) -> str:
    kinds = [kind.device.name for kind in profile.kinds]
    if len(kinds) > 1:
        return f"{len(profile.layers)} layers on {', '.join(kinds)}"
    seconds = sum(layer.costs[0].forward_s + layer.costs[0].backward_s for layer in profile.layers)
    return f"{len(profile.layers)} layers of {seconds:.6g} s"


def _read(system: str, files: list[Path], profiled_batch: int | None) -> Profile:
    from autopar import api

    if system == _KINDS:
        return api.import_profiles(files)
    return api.import_pipedream(files[0], 1 if profiled_batch is None else profiled_batch)
