"""``autopar cluster``: measure the links between ranks, and list what is known of hardware that is not at hand."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli import arguments
from autopar.cli.commands import add, examples
from autopar.cli.output import say, screen
from autopar.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.formats.cluster import Cluster
    from autopar.formats.profile import DeviceType


_OUTPUT = Path("cluster.json")
_LEAST_BYTES, _MOST_BYTES = 16 * 2**10, 64 * 2**30
_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    help="Measure the links of a cluster, or list known GPUs and clusters.",
    epilog=examples("autopar cluster list"),
    no_args_is_help=True,
    context_settings=_HELP,
)


def probe(
    ranks: Annotated[
        int | None, typer.Option(help="Local ranks to start; default: the number of GPUs, or 2. Not under torchrun.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads per rank on the CPU.", min=1)] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="In fewer rounds, and no overlap.")] = False,
    largest: Annotated[
        str | None, typer.Option(help="Largest message; default: 64MiB between CPUs, 1GiB between GPUs.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the cluster.")] = _OUTPUT,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Put the cluster on stdout as JSON.")] = False,
) -> None:
    """Measure messages, all-reduce, all-gather and reduce-scatter between ranks, in a node and over the network.

    On one machine: autopar cluster probe. On several, on each of them:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m autopar cluster probe
    """
    from autopar.cli.output import check_output

    launched = "RANK" in os.environ
    leads = os.environ.get("RANK", "0") == "0"
    try:
        if leads:
            check_output(output, _OUTPUT, overwrite=overwrite)
        _check_ranks(ranks, launched)
        largest_bytes = _largest(largest)
    except UsageError:
        # Every rank finds the same mistake on the command line, and one says it; what a host lacks, its ranks say.
        if leads:
            raise
        raise typer.Exit(UsageError.exit_code) from None
    if launched:
        measured = _measure_as_rank(device, threads, quick, largest_bytes)
    else:
        measured = _measure_here(ranks, device, threads, quick, largest_bytes)
    if measured is not None:
        _write_cluster(measured, output, as_json)


def _measure_here(ranks: int | None, device: str, threads: int, quick: bool, largest_bytes: int | None) -> Cluster:
    """Measure between ranks that are started on this machine."""
    from autopar import api
    from autopar.cli.progress import phases

    with phases() as progress:
        return api.probe(
            ranks=ranks, device=device, threads=threads, quick=quick, largest_bytes=largest_bytes, progress=progress
        )


def _check_ranks(ranks: int | None, under_torchrun: bool) -> None:
    if ranks is not None and (under_torchrun or ranks < 2):
        why = "torchrun has started the ranks; leave it out" if under_torchrun else "links connect at least 2 ranks"
        raise UsageError(f"--ranks {ranks}: {why}")
    if under_torchrun and os.environ.get("WORLD_SIZE") == "1":
        raise UsageError("torchrun started a single rank: links connect at least 2 ranks; raise --nproc-per-node")


def _largest(text: str | None) -> int | None:
    from autopar.formats.document import parse_bytes

    if text is None:
        return None
    size = parse_bytes(text, "--largest")
    if not _LEAST_BYTES <= size <= _MOST_BYTES:
        raise UsageError(f"--largest {text!r}: must lie between 16KiB and 64GiB; messages of 12 sizes start at 1 KiB")
    return size


def _measure_as_rank(device: str, threads: int, quick: bool, largest_bytes: int | None) -> Cluster | None:
    """Measure as one of torchrun's ranks; return the cluster on the one that writes it."""
    from autopar.cli.progress import phases
    from autopar.formats.cluster import PROBED
    from autopar.profiler.device import choose
    from autopar.profiler.probe import Probe, measure_from_environment, measured_cluster

    probe = Probe(quick, largest_bytes)
    kind: DeviceType = "cuda" if choose(device).type == "cuda" else "cpu"
    if os.environ["RANK"] != "0":
        measure_from_environment(kind, threads, probe)
        return None
    with phases() as progress:
        progress("joining the other ranks", 0.0)
        measured = measure_from_environment(kind, threads, probe, progress)
    return None if measured is None else measured_cluster(measured, kind, PROBED)


def list_known(
    cluster: Annotated[
        str | None,
        typer.Argument(
            help="A name, such as 4x8xA100-80G:200Gbps, or a .json or .toml file, to be shown.",
            autocompletion=arguments.clusters,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Put the GPUs, or the cluster, on stdout as JSON.")] = False,
) -> None:
    """List the known GPUs, with the sources of their numbers, and examples of clusters; or show one cluster."""
    console = screen()
    if cluster is not None:
        _show(cluster, console, as_json)
        return
    from autopar.hardware.clusters import EXAMPLES, GRAMMAR
    from autopar.hardware.gpus import GPUS
    from autopar.report.cluster import render_gpus

    render_gpus(GPUS, console)
    examples = ", ".join(EXAMPLES)
    title = f"Clusters: {GRAMMAR}, bandwidths of a node, such as"
    say(console, title, "bold")
    say(console, f"{examples}; `autopar cluster list {EXAMPLES[0]}` shows one")
    if as_json:
        sys.stdout.write(json.dumps([asdict(gpu) for gpu in GPUS], indent=1) + "\n")


def _show(text: str, console: Console, as_json: bool) -> None:
    from autopar.hardware.clusters import find_cluster
    from autopar.report.cluster import render

    found = find_cluster(text)
    render(found, console)
    if as_json:
        sys.stdout.write(found.dumps())


def _write_cluster(cluster: Cluster, output: Path, as_json: bool) -> None:
    from autopar.report.cluster import render

    cluster.save(output)
    console = screen()
    render(cluster, console, sizes=True)
    say(console, f"Written: {output}; `autopar plan --cluster {output}` plans with it")
    if as_json:
        sys.stdout.write(cluster.dumps())


add(app, "probe", probe, "autopar cluster probe --ranks 4 -o cluster.json")
add(app, "list", list_known, "autopar cluster list", "autopar cluster list 4x8xA100-80G:200Gbps --json")
