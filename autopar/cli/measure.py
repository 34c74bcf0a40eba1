"""Commands that measure or estimate what plans are made of: ``autopar profile``, and ``autopar cluster``.

``profile`` is of a model's layers and the links between local ranks, ``cluster`` of the links between ranks of several
hosts, and it lists what is known of hardware that is not at hand.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from autopar import api
from autopar.cli import arguments
from autopar.cli.arguments import PROFILED_FILE, Overwrite, add, group, json_option, output_option, with_flags
from autopar.cli.output import check_output, phases, put, say, screen
from autopar.errors import FileError, UsageError
from autopar.formats.profile import path_of
from autopar.formats.references import rebase_paths
from autopar.options.probe import ProbeOptions
from autopar.options.profile import ProfileOptions

if TYPE_CHECKING:
    from autopar.formats.cluster import Cluster
    from autopar.formats.profile import DeviceType, Profile


_CLUSTER = "cluster.json"
_HEAD_BYTES = 100


def profile(
    model: Annotated[
        str,
        typer.Argument(
            help="A Python file with model(), package.module:factory, or hf: and a Transformers configuration."
        ),
    ],
    *,
    options: ProfileOptions,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Local ranks whose links are measured; default: 2, or the number of GPUs. "
            "Of a GPU that is not there: how many a node has; default: 8, of GB200s 72."
        ),
    ] = None,
    output: Annotated[Path, output_option("Where to write the profile.")] = PROFILED_FILE,
    cluster_output: Annotated[
        Path | None,
        output_option("Where to write the links; default: cluster.json beside the profile.", "--cluster-output"),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, json_option("the profile")] = False,
) -> None:
    """Measure every layer of a model on this machine, and the links between local ranks.

    For a GPU that is not there, all of this is estimated.
    """
    from autopar.api.estimates import device_kinds, node_of

    links_output = cluster_output or output.parent / _CLUSTER
    kept = None if cluster_output or overwrite else _kept_cluster(links_output, output)
    if kept is not None and ranks is not None:
        raise UsageError(
            f"--ranks {ranks}: {links_output} holds links that {kept.command} measured; pass --overwrite to replace "
            "it, or name another --cluster-output"
        )
    if links_output.resolve() == output.resolve():
        raise UsageError(f"{output} cannot hold both the profile and the cluster; name another --cluster-output")
    kinds = device_kinds(options)
    source = path_of(model)
    inputs = tuple(path for path in (source and Path(source), options.data, options.calibrate_with) if path)
    check_output(output, PROFILED_FILE, overwrite=overwrite, inputs=inputs)
    if kept is None:
        check_output(links_output, Path(_CLUSTER), overwrite=overwrite, inputs=inputs)

    here = None if kinds.gpus else kinds.here
    local = 0 if here is None else _local_ranks(here, ranks)
    with phases(sums_up=True) as progress:
        made: Profile = api.profile(model, options.batch, options, progress=progress)
        cluster = None
        if kept is None and here is None:
            cluster = node_of(made, ranks)
        elif kept is None and local > 1:
            progress(f"measuring links between {local} ranks", 0.0)
            cluster = api.links(ranks=local, device=options.device, threads=options.threads, progress=progress)
    named = made.model.model_copy(update={"data": None if options.data is None else str(options.data)})
    made = with_flags(made.model_copy(update={"model": rebase_paths(named, PROFILED_FILE, output)}))
    made.save(output)
    if cluster is not None:
        cluster.save(links_output)
    _show_profile(made, output, links_output, kept, with_links=cluster is not None)
    put(made, as_json)


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


class _KeptCluster(NamedTuple):
    """A cluster that is not replaced unasked."""

    cluster: Cluster
    command: str
    """What has written it."""


def _kept_cluster(path: Path, output: Path) -> _KeptCluster | None:
    """Return the cluster in a file that stays: one that was probed, which took longer, or another profile's."""
    from autopar.formats.cluster import PROBED, Cluster

    try:
        found = Cluster.load(path)
    except FileError:
        return None
    if found.name == PROBED:
        return _KeptCluster(found, "`autopar cluster probe`")
    other = next((each for each in sorted(path.parent.glob("*.json")) if each != output and _is_profile(each)), None)
    return None if other is None else _KeptCluster(found, f"`autopar profile --output {other}`")


def _is_profile(path: Path) -> bool:
    """Tell whether a file begins as profiles do: it may be a large file of anybody's."""
    try:
        with path.open("rb") as file:
            return b'"autopar.profile"' in file.read(_HEAD_BYTES)
    except OSError:
        return False


def _show_profile(profile: Profile, output: Path, links: Path, kept: _KeptCluster | None, *, with_links: bool) -> None:
    from autopar.report.inputs import render_profile
    from autopar.report.table import print_parts

    console = screen()
    print_parts(render_profile(profile), console)
    files = f"{output} and {links}" if with_links else str(output)
    lines = [f"Written: {files}; `autopar plan {output}` plans with {'them' if with_links else 'it'}"]
    if kept is not None:
        lines.append(
            f"Kept: {links}, which {kept.command} wrote{_other(kept.cluster, profile)}; --overwrite replaces it, "
            "--cluster-output writes another"
        )
    default = output.parent / _CLUSTER
    if kept is None and default.exists() and not (with_links and default == links):
        lines.append(
            f"note: {default} was there before and is not of this profile, but `autopar plan` reads it; remove it, or "
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


clusters = group("Measure the links of a cluster, or list known GPUs and clusters.", "autopar cluster list")


def probe(
    *,
    options: ProbeOptions,
    output: Annotated[Path, output_option("Where to write the cluster.")] = Path(_CLUSTER),
    overwrite: Overwrite = False,
    as_json: Annotated[bool, json_option("the cluster")] = False,
) -> None:
    """Measure messages, all-reduce, all-gather and reduce-scatter between ranks, in a node and over the network.

    On one machine: autopar cluster probe. On several, on each of them:

    PYTHONSAFEPATH=1 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m autopar
    cluster probe
    """
    launched = "RANK" in os.environ
    if launched and options.ranks is not None:
        raise UsageError(f"--ranks {options.ranks}: torchrun has started the ranks; leave it out")
    if launched and os.environ.get("WORLD_SIZE") == "1":
        raise UsageError("torchrun started a single rank: links connect at least 2 ranks; raise --nproc-per-node")
    if os.environ.get("RANK", "0") == "0":
        check_output(output, Path(_CLUSTER), overwrite=overwrite)
    if launched:
        measured = _measure_as_rank(options)
    else:
        with phases() as progress:
            measured = api.probe(options, progress=progress)
    if measured is None:
        return
    from autopar.report.inputs import render_cluster
    from autopar.report.table import print_parts

    measured.save(output)
    console = screen()
    print_parts(render_cluster(measured, sizes=True), console)
    say(console, f"Written: {output}; `autopar plan --cluster {output}` plans with it")
    put(measured, as_json)


def _measure_as_rank(options: ProbeOptions) -> Cluster | None:
    """Measure as one of torchrun's ranks; return the cluster on the one that writes it."""
    from autopar.formats.cluster import PROBED
    from autopar.profiler.device import choose
    from autopar.profiler.probe import Probe, measure_from_environment

    probe, threads = Probe(options.quick, options.largest_bytes), options.threads
    kind: DeviceType = "cuda" if choose(options.device).type == "cuda" else "cpu"
    if os.environ["RANK"] != "0":
        measure_from_environment(kind, threads, probe)
        return None
    with phases() as progress:
        progress("joining the other ranks", 0.0)
        measured = measure_from_environment(kind, threads, probe, progress)
    return None if measured is None else measured.model_copy(update={"name": PROBED})


def list_known(
    cluster: Annotated[
        str | None,
        typer.Argument(
            help="A name, such as 4x8xA100-80G:200Gbps, or a .json or .toml file, to be shown.",
            autocompletion=arguments.clusters,
        ),
    ] = None,
    as_json: Annotated[bool, json_option("the GPUs, or the cluster,")] = False,
) -> None:
    """List the known GPUs, with the sources of their numbers, and examples of clusters; or show one cluster."""
    from autopar.hardware.clusters import EXAMPLES, GRAMMAR, find_cluster
    from autopar.hardware.fabrics import FABRICS
    from autopar.hardware.gpus import GPUS
    from autopar.report.inputs import render_cluster, render_fabrics, render_gpus
    from autopar.report.table import print_parts

    console = screen()
    if cluster is not None:
        found = find_cluster(cluster)
        print_parts(render_cluster(found), console)
        put(found, as_json)
        return
    print_parts(render_gpus(GPUS), console)
    print_parts(render_fabrics(FABRICS), console)
    examples = ", ".join(EXAMPLES)
    title = f"Clusters: {GRAMMAR}, bandwidths of a node, such as"
    say(console, title, "bold")
    say(console, f"{examples}; `autopar cluster list {EXAMPLES[0]}` shows one")
    put([asdict(gpu) for gpu in GPUS], as_json)


add(clusters, "probe", probe, "autopar cluster probe --ranks 4 -o cluster.json", of_ranks=True)
add(clusters, "list", list_known, "autopar cluster list", "autopar cluster list 4x8xA100-80G:200Gbps --json")
