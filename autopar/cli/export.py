"""``autopar export``: a plan in the words of another trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli import arguments
from autopar.cli.output import say, screen

Format = Annotated[
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
    typer.Option("--output", "-o", help="Where to write the main file; others go beside it. Default: its own name."),
]
Nearest = Annotated[
    bool, typer.Option("--nearest", help="Where the trainer cannot express the plan, export the nearest that it can.")
]
ScheduleFile = Annotated[
    str | None,
    typer.Option(help="Of torchtitan: write the plan's own schedule, too, under this name, and have it read there."),
]


def command(
    target: Format,
    plan: Annotated[Path, typer.Argument(help="What `autopar plan` wrote.")] = Path("plan.json"),
    output: Output = None,
    nearest: Nearest = False,
    schedule_file: ScheduleFile = None,
    profile: Annotated[Path | None, typer.Option(help="Profile to use in place of the one the plan records.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Cluster, a file or a name, to use in place of the one the plan records.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
) -> None:
    """Write a plan as the configuration of another trainer, or as the launch of autopar's own ranks."""
    from autopar.exports import target_of

    output = Path(target_of(target).file) if output is None else output
    options = {"nearest": nearest, "schedule_file": schedule_file, "profile": profile, "cluster": cluster}
    _export(target, plan, output, options, overwrite=overwrite)


def _export(target: str, plan: Path, output: Path, options: dict[str, Any], *, overwrite: bool) -> None:
    from autopar import api
    from autopar.cli.arguments import as_flags
    from autopar.cli.output import check_outputs
    from autopar.cli.progress import slow_phases
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
