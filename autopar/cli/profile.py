"""``autopar profile``: measure a model's layers and the links between local ranks, or estimate them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autopar.cli import arguments
from autopar.cli.output import say, screen
from autopar.errors import FileError, UsageError
from autopar.formats.profile import path_of

if TYPE_CHECKING:
    from autopar.formats.cluster import Cluster
    from autopar.formats.profile import Profile
    from autopar.progress import Progress


_OUTPUT = Path("profile.json")
_CLUSTER = "cluster.json"


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="A Python file with model(), package.module:factory, or hf: and a Transformers configuration."
        ),
    ],
    batch: Annotated[int, typer.Option(help="Samples per step; the largest micro-batch measured.", min=1)] = 64,
    device: Annotated[
        str,
        typer.Option(
            help="auto, cpu, cuda; or a GPU that is not there, such as H100 (`autopar cluster list`); or several kinds "
            "of GPUs, such as H100,A100-80G or cuda,A100-80G.",
            autocompletion=arguments.devices,
        ),
    ] = "auto",
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Local ranks whose links are measured; default: 2, or the number of GPUs. "
            "Of a GPU that is not there: how many a node has; default: 8."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads per rank on the CPU; default: 1.", min=1)] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="bf16, fp16: float32 parameters, layers under autocast; default: the parameters' own."),
    ] = None,
    compile_layers: Annotated[
        bool, typer.Option("--compile", help="Compile every layer with torch.compile; needs a compiler.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="A Python file whose dataset() feeds an hf: model; default: synthetic inputs.")
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(help="Tokens of a synthetic sample of an hf: model; default: its positions, at most 2048.", min=2),
    ] = None,
    calibrate_with: Annotated[
        Path | None,
        typer.Option(help="Measured runs (CSV) that the estimates for a GPU that is not there are fitted to."),
    ] = None,
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="Take a loss that depends on how a mini-batch is divided; plans say so."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed for the weights that model() draws.", min=0, max=2**63 - 1)] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the profile.")] = _OUTPUT,
    cluster_output: Annotated[
        Path | None, typer.Option(help="Where to write the links; default: cluster.json beside the profile.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing output files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Put the profile on stdout as JSON.")] = False,
) -> None:
    """Measure every layer of a model on this machine, and the links between local ranks.

    For a GPU that is not there, all of this is estimated.
    """
    from autopar.cli.arguments import with_flags
    from autopar.cli.output import check_output, phases
    from autopar.estimates import device_kinds, node_of
    from autopar.formats.references import rebase_paths

    links_output = cluster_output or output.parent / _CLUSTER
    kept = None if cluster_output or overwrite else _load_probed_cluster(links_output)
    if kept is not None and ranks is not None:
        raise UsageError(
            f"--ranks {ranks}: {links_output} holds links that `autopar cluster probe` measured; pass --overwrite to "
            "replace it, or name another --cluster-output"
        )
    if links_output.resolve() == output.resolve():
        raise UsageError(f"{output} cannot hold both the profile and the cluster; name another --cluster-output")
    kinds = device_kinds(device, threads, compile_layers, calibrate_with)
    source = path_of(model)
    inputs = tuple(path for path in (source and Path(source), data, calibrate_with) if path)
    check_output(output, _OUTPUT, overwrite=overwrite, inputs=inputs)
    if kept is None:
        check_output(links_output, Path(_CLUSTER), overwrite=overwrite, inputs=inputs)

    from autopar import api

    here = None if kinds.gpus else kinds.here
    local = 0 if here is None else _local_ranks(here, ranks)
    with phases() as progress:
        made = api.profile(
            model,
            batch,
            device=device,
            threads=threads,
            precision=precision,
            compile=compile_layers,
            data=data,
            sequence=sequence,
            calibrate_with=calibrate_with,
            accept_loss=accept_loss,
            seed=seed,
            progress=progress,
        )
        cluster = None
        if kept is None:
            cluster = node_of(made, ranks) if here is None else _measured_links(local, here, threads or 1, progress)
    named = made.model.model_copy(update={"data": None if data is None else str(data)})
    made = with_flags(made.model_copy(update={"model": rebase_paths(named, _OUTPUT, output)}))
    made.save(output)
    if cluster is not None:
        cluster.save(links_output)
    _show(made, output, links_output, kept, with_links=cluster is not None)
    if as_json:
        sys.stdout.write(made.dumps())


def _local_ranks(here: str, ranks: int | None) -> int:
    """Return how many ranks of this machine measure links; one alone has none."""
    from autopar.profiler.device import choose, count

    chosen = choose(here)
    gpus = count(chosen) if chosen.type == "cuda" else None
    if ranks is not None and ranks < 2:
        raise UsageError(f"--ranks {ranks}: links connect at least 2 ranks")
    if gpus is not None and ranks is not None and ranks > gpus:
        raise UsageError(f"--ranks {ranks}: this machine has {gpus} GPUs")
    return ranks if ranks is not None else gpus if gpus is not None else 2


def _measured_links(local: int, device: str, threads: int, progress: Progress) -> Cluster | None:
    from autopar import api

    if local < 2:
        return None
    progress(f"measuring links between {local} ranks", 0.0)
    return api.links(ranks=local, device=device, threads=threads, progress=progress)


def _load_probed_cluster(path: Path) -> Cluster | None:
    """Return the cluster in a file if `autopar cluster probe` measured it, which took more than is measured here."""
    from autopar.formats.cluster import PROBED, Cluster

    try:
        found = Cluster.load(path)
    except FileError:
        return None
    return found if found.name == PROBED else None


def _show(profile: Profile, output: Path, links: Path, probed_cluster: Cluster | None, *, with_links: bool) -> None:
    from autopar.report.inputs import render_profile

    console = screen()
    render_profile(profile, console)
    files = f"{output} and {links}" if with_links else str(output)
    lines = [f"Written: {files}; `autopar plan {output}` plans with {'them' if with_links else 'it'}"]
    if probed_cluster is not None:
        lines.append(
            f"Kept: {links}, which `autopar cluster probe` wrote{_other(probed_cluster, profile)}; "
            "--overwrite replaces it"
        )
    beside = output.parent / _CLUSTER
    if probed_cluster is None and beside.exists() and not (with_links and beside == links):
        lines.append(
            f"note: {beside} was there before and is not of this profile, but `autopar plan` reads it; remove it, or "
            "plan with --cluster"
        )
    for line in lines:
        say(console, line)


def _other(cluster: Cluster, profile: Profile) -> str:
    """Say so where a cluster's devices are not of the kind that a profile is for."""
    kinds = sorted({device.type for device in cluster.devices})
    if all((kind == "cpu") == (profile.device.type == "cpu") for kind in kinds):
        return ""
    return f" and whose devices are {', '.join(kinds)}, not {profile.device.type} as the profile's"
