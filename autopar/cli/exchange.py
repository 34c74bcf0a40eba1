"""Commands between autopar and other systems: ``autopar export`` and ``autopar import``.

A plan in the words of another trainer; and profiles that another system, or other machines, measured, and other
trainers' stages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar import api
from autopar.cli import arguments
from autopar.cli.arguments import (
    PLANNED_FILE,
    PROFILED_FILE,
    OtherCluster,
    OtherProfile,
    Overwrite,
    PlanFile,
    as_flags,
    json_option,
    output_option,
    with_flags,
)
from autopar.cli.output import check_output, check_outputs, put, say, screen, slow_phases
from autopar.errors import FileError, UsageError, unknown
from autopar.formats.document import write_text
from autopar.formats.references import rebase_paths

if TYPE_CHECKING:
    from autopar.formats.profile import Profile
    from autopar.interop.target import DictatedStages


def export(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help="torch: a schedule file of torch's pipelining, and its stages; torchtitan: a module of its "
            "configuration; megatron: Megatron-LM's arguments; deepspeed: its JSON, and a pipeline's parts; "
            "accelerate: its YAML; torchrun, slurm, kubernetes: the launch of autopar itself.",
            autocompletion=arguments.targets,
        ),
    ],
    plan: PlanFile = PLANNED_FILE,
    output: Annotated[
        Path | None, output_option("Where to write the main file; others go beside it. Default: its own name.")
    ] = None,
    nearest: Annotated[
        bool,
        typer.Option("--nearest", help="Where the trainer cannot express the plan, export the nearest that it can."),
    ] = False,
    schedule_file: Annotated[
        str | None,
        typer.Option(
            help="Of torchtitan: write the plan's own schedule, too, under this name, and have it read there."
        ),
    ] = None,
    profile: OtherProfile = None,
    cluster: OtherCluster = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a plan as the configuration of another trainer, or as the launch of autopar's own ranks."""
    from autopar.api.exports import target_of

    output = Path(target_of(target).file) if output is None else output
    with slow_phases("planning") as progress:
        progress("looking at the plan", 0.0)
        options: dict[str, Any] = {"nearest": nearest, "schedule_file": schedule_file}
        made = api.export(plan, target, output=output, profile=profile, cluster=cluster, **options)
    paths = [output, *(output.parent / file.name for file in made.files[1:])]
    check_outputs(plan, (profile, cluster, None), paths, overwrite=overwrite)
    for path, file in zip(paths, made.files, strict=True):
        write_text(path, file.text)
    for note in made.notes:
        say(screen(), f"note: {as_flags(note)}")
    say(screen(), f"Written: {', '.join(map(str, paths))}")


_KINDS = "profiles"
_STAGES = ("layout", "torchtitan")
_FORMATS = ("pipedream", _KINDS, *_STAGES)
_OF_FORMATS = {
    "profiled_batch": ("pipedream",),
    "profile": _STAGES,
    "replicas": _STAGES,
    "pipeline_size": ("layout",),
}
"""Which formats have an option."""


ImportFormat = Annotated[
    str,
    typer.Argument(
        metavar="FORMAT",
        help="pipedream: the text graph of PipeDream and DAPPLE; profiles: autopar's own, of one model on several "
        "kinds of devices; layout: Megatron's text of stages, such as 'Et*7|t*9L'; torchtitan: the stages of its "
        "configuration.",
        autocompletion=arguments.offering(_FORMATS),
    ),
]
Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="The file to read; of profiles, one for each kind; of layout, the text."),
]


def import_(
    system: ImportFormat,
    files: Files,
    profiled_batch: Annotated[
        int | None,
        typer.Option(help="Samples of the mini-batch that was profiled (pipedream); default: it counts as 1."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Profile whose layers stages are of (layout, torchtitan); default: profile.json."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Pipelines beside each other (layout: 1; torchtitan: as its file says).")
    ] = None,
    pipeline_size: Annotated[
        int | None, typer.Option(help="Devices of a pipeline (layout); default: as many as there are stages.")
    ] = None,
    output: Annotated[Path, output_option("Where to write the profile.")] = PROFILED_FILE,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, json_option("the profile, or the stages,")] = False,
) -> None:
    """Read another system's profile, or several of autopar's, as one profile; or another trainer's stages."""
    if system not in _FORMATS:
        raise unknown(UsageError, f"FORMAT must be one of {', '.join(_FORMATS)}; found {system!r}", system, _FORMATS)
    options = {
        "profiled_batch": profiled_batch,
        "profile": profile,
        "replicas": replicas,
        "pipeline_size": pipeline_size,
    }
    for name, value in options.items():
        if value is not None and system not in _OF_FORMATS[name]:
            raise UsageError(f"`{name}` is of {' and '.join(_OF_FORMATS[name])}; leave it out for {system}")
    if system == _KINDS and len(files) < 2:
        raise UsageError(f"{files[0]} is the only profile; name one for each kind of device")
    if system != _KINDS and len(files) > 1:
        raise UsageError(f"{files[1]} is a second file; {system} profiles are read one at a time")
    measured = profile or PROFILED_FILE
    if system == "torchtitan":
        _say_stages(api.import_torchtitan(files[0], measured, replicas=replicas), as_json)
    elif system == "layout":
        text, pipelines = str(files[0]), 1 if replicas is None else replicas
        _say_stages(api.import_layout(text, measured, replicas=pipelines, pipeline_size=pipeline_size), as_json)
    else:
        _import_profile(
            system, files, 1 if profiled_batch is None else profiled_batch, output, overwrite=overwrite, as_json=as_json
        )


def _import_profile(
    system: str, files: list[Path], profiled_batch: int, output: Path, *, overwrite: bool, as_json: bool
) -> None:

    for file in files:
        if not file.exists():
            wrote = "`autopar profile`" if system == _KINDS else system
            raise FileError(f"{file}: no such file; name one that {wrote} wrote")
    check_output(output, PROFILED_FILE, overwrite=overwrite, inputs=tuple(files))
    read = api.import_profiles(files) if system == _KINDS else api.import_pipedream(files[0], profiled_batch)
    profile = with_flags(read.model_copy(update={"model": rebase_paths(read.model, files[0], output)}))
    profile.save(output)
    console = screen()
    for note in profile.notes:
        say(console, f"Note: {note}")
    say(console, f"Written: {output}, {_content(profile)}; `autopar plan {output}` plans for it")
    put(profile, as_json)


def _say_stages(found: DictatedStages, as_json: bool) -> None:
    """Put the stages on standard output, and say what plans and compares them."""
    import json

    options = ", ".join(f"{name}={value!r}" for name, value in found.options.items())
    flags = as_flags(f"`{options}`")
    say(screen(), f"`autopar plan {flags}` plans them and says how far from the best they are, `autopar compare` too")
    sys.stdout.write(f"{json.dumps(found.options) if as_json else found.stages}\n")


def _content(profile: Profile) -> str:
    kinds = [kind.device.name for kind in profile.kinds]
    if len(kinds) > 1:
        return f"{len(profile.layers)} layers on {', '.join(kinds)}"
    seconds = sum(layer.costs[0].forward_s + layer.costs[0].backward_s for layer in profile.layers)
    return f"{len(profile.layers)} layers of {seconds:.6g} s"
