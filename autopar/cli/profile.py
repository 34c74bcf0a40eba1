"""``autopar profile``: measure a model's layers, and the links between local ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.formats.profile import Profile

__all__ = ["command"]

_OUTPUT = Path("profile.json")
_CLUSTER = "cluster.json"


def command(
    model: Annotated[str, typer.Argument(help="A Python file with model(), or package.module:factory.")],
    batch: Annotated[int, typer.Option(help="Samples per step; the largest micro-batch measured.", min=1)] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    ranks: Annotated[
        int | None, typer.Option(help="Local ranks whose links are measured; default: 2, or the number of GPUs.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads per rank on the CPU.", min=1)] = 1,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="bf16, fp16: float32 parameters, layers under autocast; default: the parameters' own."),
    ] = None,
    compile_layers: Annotated[
        bool, typer.Option("--compile", help="Compile every layer with torch.compile; needs a compiler.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed for the weights that model() draws.", min=0, max=2**63 - 1)] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the profile.")] = _OUTPUT,
    cluster_output: Annotated[
        Path | None, typer.Option(help="Where to write the links; default: cluster.json beside the profile.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing output files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Put the profile on stdout as JSON.")] = False,
) -> None:
    """Measure every layer of a model on this machine, and the links between local ranks."""
    from autopar.cli.progress import phases
    from autopar.cli.references import check_output

    links_output = cluster_output or output.parent / _CLUSTER
    if links_output.resolve() == output.resolve():
        raise UsageError(f"{output} cannot hold both the profile and the cluster; name another --cluster-output")
    inputs = (Path(model),) if model.endswith(".py") else ()
    check_output(output, _OUTPUT, overwrite=overwrite, inputs=inputs)
    check_output(links_output, Path(_CLUSTER), overwrite=overwrite, inputs=inputs)

    from autopar.capture import load
    from autopar.profiler import ProfileOptions, local_cluster, measure_links, profile
    from autopar.profiler.device import choose, count

    chosen = choose(device)
    ranks = _ranks(ranks, count(chosen) if chosen.type == "cuda" else None)
    user = load(model)
    options = ProfileOptions(
        batch=batch, device=device, threads=threads, seed=seed, precision=precision, compile=compile_layers
    )
    with phases() as progress:
        measured = profile(user, options, progress)
        cluster = None
        if ranks > 1:
            progress(f"measuring links between {ranks} ranks", 0.0)
            cluster = local_cluster(measure_links(ranks, chosen.type, threads), measured.device, count(chosen))
    measured = measured.model_copy(
        update={"model": measured.model.model_copy(update={"source": _source(model, output)})}
    )
    measured.save(output)
    if cluster is not None:
        cluster.save(links_output)
    _show(measured, output, links_output if cluster is not None else None)
    if as_json:
        sys.stdout.write(measured.dumps())


def _ranks(asked: int | None, gpus: int | None) -> int:
    if asked is not None and asked < 2:
        raise UsageError(f"--ranks {asked}: links connect at least 2 ranks")
    if gpus is not None and asked is not None and asked > gpus:
        raise UsageError(f"--ranks {asked}: this machine has {gpus} GPUs")
    return asked if asked is not None else gpus if gpus is not None else 2


def _source(spec: str, output: Path) -> str:
    from autopar.cli.references import rebase

    return rebase(spec, _OUTPUT, output)


def _show(profile: Profile, output: Path, cluster: Path | None) -> None:
    from rich.console import Console

    from autopar.report.profile import render

    console = Console(stderr=True)
    render(profile, console)
    files = f"{output} and {cluster}" if cluster is not None else str(output)
    console.print(f"Written: {files}; `autopar plan {output}` plans with them", highlight=False, markup=False)
