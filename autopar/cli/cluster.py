"""``autopar cluster``: measure the links between ranks, and list what is known of hardware that is not at hand."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.formats.cluster import Cluster

__all__ = ["app"]

_OUTPUT = Path("cluster.json")
_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    help="Measure the links of a cluster, or list known GPUs and clusters.",
    no_args_is_help=True,
    context_settings=_HELP,
)


@app.command("probe")
def probe(
    ranks: Annotated[
        int | None, typer.Option(help="Local ranks to start; default: the number of GPUs, or 2. Not under torchrun.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads per rank on the CPU.", min=1)] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="Messages and all-reduces alone, in fewer rounds, and no overlap.")
    ] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the cluster.")] = _OUTPUT,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Put the cluster on stdout as JSON.")] = False,
) -> None:
    """Measure messages, all-reduce, all-gather and reduce-scatter between ranks, in a node and over the network.

    On one machine: autopar cluster probe. On several, on each of them:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m autopar cluster probe
    """
    launched = "RANK" in os.environ
    leads = os.environ.get("RANK", "0") == "0"
    try:
        measured = _measured(ranks, device, threads, quick, output if leads else None, overwrite, launched)
    except UsageError:
        # Every rank finds the same mistake: one of them says it.
        if leads:
            raise
        raise typer.Exit(UsageError.exit_code) from None
    if measured is not None:
        _deliver(measured, output, as_json)


def _measured(
    ranks: int | None, device: str, threads: int, quick: bool, output: Path | None, overwrite: bool, launched: bool
) -> Cluster | None:
    """Return the measured cluster, on the one rank that writes it."""
    from autopar.cli.references import check_output

    if output is not None:
        check_output(output, _OUTPUT, overwrite=overwrite)
    if ranks is not None and (launched or ranks < 2):
        why = "torchrun has started the ranks; leave it out" if launched else "links connect at least 2 ranks"
        raise UsageError(f"--ranks {ranks}: {why}")
    if launched and os.environ.get("WORLD_SIZE") == "1":
        raise UsageError("torchrun started a single rank: links connect at least 2 ranks; raise --nproc-per-node")

    from autopar.cli.progress import phases
    from autopar.profiler.device import choose, count, describe
    from autopar.profiler.links import local_cluster, measure_from_environment, measure_links, measured_cluster
    from autopar.profiler.probe import Probe

    chosen = choose(device)
    asked = Probe(quick=quick)
    if launched:
        if output is None:
            measure_from_environment(chosen.type, threads, asked)
            return None
        with phases() as progress:
            progress("joining the other ranks", 0.0)
            found = measure_from_environment(chosen.type, threads, asked, progress)
        assert found is not None
        return measured_cluster(found, describe(chosen, threads).type, "probed")
    started = ranks or max(2, count(chosen) if chosen.type == "cuda" else 2)
    if chosen.type == "cuda" and started > count(chosen):
        raise UsageError(
            f"--ranks {started}: this machine has {count(chosen)} GPUs, and links connect at least 2 ranks"
        )
    with phases() as progress:
        progress("starting ranks", 0.0)
        found = measure_links(started, chosen.type, threads, asked, progress)
    return local_cluster(found, describe(chosen, threads), max(started, count(chosen)))


@app.command("list")
def list_known(
    cluster: Annotated[
        str | None, typer.Argument(help="A name, such as 4x8xA100-80G:200Gbps, or a .json or .toml file, to be shown.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Put the GPUs, or the cluster, on stdout as JSON.")] = False,
) -> None:
    """List the known GPUs, with the sources of their numbers, and examples of clusters; or show one cluster."""
    from rich.console import Console

    console = Console(stderr=True)
    if cluster is not None:
        _show(cluster, console, as_json)
        return
    from autopar.hardware.clusters import EXAMPLES
    from autopar.hardware.gpus import GPUS
    from autopar.report.gpus import render

    render(GPUS, console)
    examples = ", ".join(EXAMPLES)
    console.print(
        "Clusters: [NODESx]GPUSxGPU[:BANDWIDTH of a node], such as", style="bold", markup=False, highlight=False
    )
    console.print(f"{examples}; `autopar cluster list {EXAMPLES[0]}` shows one", markup=False, highlight=False)
    if as_json:
        sys.stdout.write(json.dumps([asdict(gpu) for gpu in GPUS], indent=1) + "\n")


def _show(text: str, console: Console, as_json: bool) -> None:
    from autopar.hardware.clusters import cluster_named, is_file, read_cluster
    from autopar.report.cluster import render

    found = read_cluster(text) if is_file(text) else cluster_named(text)
    render(found, console)
    if as_json:
        sys.stdout.write(found.dumps())


def _deliver(cluster: Cluster, output: Path, as_json: bool) -> None:
    from rich.console import Console

    from autopar.report.cluster import render

    cluster.save(output)
    console = Console(stderr=True)
    render(cluster, console, sizes=True)
    console.print(f"Written: {output}; `autopar plan --cluster {output}` plans with it", highlight=False, markup=False)
    if as_json:
        sys.stdout.write(cluster.dumps())
