"""``autopar profile``: measure a model's layers and the links between local ranks, or estimate them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autopar.cli import completion
from autopar.cli.screen import say, screen
from autopar.errors import FileError, UsageError
from autopar.formats.profile import path_of

if TYPE_CHECKING:
    from autopar.capture import UserModel
    from autopar.formats.cluster import Cluster
    from autopar.formats.profile import Profile
    from autopar.hardware.gpus import Gpu
    from autopar.profiler.options import ProfileOptions, Progress

__all__ = ["command"]

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
            autocompletion=completion.devices,
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
    from autopar.cli.progress import phases
    from autopar.cli.references import check_output, rebased

    links_output = cluster_output or output.parent / _CLUSTER
    kept = None if cluster_output or overwrite else _probed(links_output)
    if kept is not None and ranks is not None:
        raise UsageError(
            f"--ranks {ranks}: {links_output} holds links that `autopar cluster probe` measured; pass --overwrite to "
            "replace it, or name another --cluster-output"
        )
    if links_output.resolve() == output.resolve():
        raise UsageError(f"{output} cannot hold both the profile and the cluster; name another --cluster-output")
    here, gpus = _kinds(device, threads, compile_layers, calibrate_with)
    source = path_of(model)
    inputs = tuple(path for path in (source and Path(source), data, calibrate_with) if path)
    check_output(output, _OUTPUT, overwrite=overwrite, inputs=inputs)
    if kept is None:
        check_output(links_output, Path(_CLUSTER), overwrite=overwrite, inputs=inputs)

    from autopar.capture import load
    from autopar.profiler import ProfileOptions

    user = load(model, None if data is None else str(data), sequence=sequence)
    options = ProfileOptions(
        batch=batch,
        device="cpu" if here is None else here,
        threads=threads or 1,
        seed=seed,
        precision=precision,
        compile=compile_layers,
        accept_loss=accept_loss,
    )
    with phases() as progress:
        if gpus:
            made, cluster = _estimated(user, options, ranks, (here, gpus), calibrate_with, progress)
        else:
            made, cluster = _measured(user, options, ranks, kept is None, progress)
    named = made.model.model_copy(update={"data": None if data is None else str(data)})
    made = made.model_copy(update={"model": rebased(named, _OUTPUT, output)})
    made.save(output)
    if cluster is not None and kept is None:
        cluster.save(links_output)
    _show(made, output, links_output, kept, written=cluster is not None and kept is None)
    if as_json:
        sys.stdout.write(made.dumps())


def _kinds(device: str, threads: int | None, compiled: bool, runs: Path | None) -> tuple[str | None, list[Gpu]]:
    """Return the device that is measured, if one is, and the GPUs that are not there; refuse what does not go together.

    Raises:
        UsageError: a GPU is not known, a kind is named twice, or an option does not go with the kinds.
    """
    names = [name.strip() for name in device.split(",")]
    here = [name for name in names if name in ("auto", "cpu", "cuda")]
    gpus = [_gpu(device, name) for name in names if name not in here]
    if len(names) == 1 and here:
        if runs is not None:
            raise UsageError(f"--calibrate-with {runs}: fits estimates; name a GPU that is not there with --device")
        return here[0], []
    if here not in ([], ["cuda"]):
        raise UsageError(
            f"--device {device}: the ranks of a pipeline are all CPUs or all GPUs, and of several kinds one at most is "
            "measured here; name GPUs, and cuda for the one of this machine"
        )
    if len({gpu.name for gpu in gpus}) < len(gpus):
        raise UsageError(f"--device {device}: the same GPU is named twice; name every kind once")
    if threads is not None or compiled:
        option = "--compile" if compiled else f"--threads {threads}"
        raise UsageError(f"{option}: says how to measure, but --device {device} is estimated; leave it out")
    if runs is not None and len(names) > 1:
        raise UsageError(
            f"--calibrate-with {runs}: the runs of one kind of GPU, but --device {device} names {len(names)}; profile "
            "each with its own runs, and join the profiles with `autopar import profiles`"
        )
    return (here[0] if here else None), gpus


def _gpu(device: str, name: str) -> Gpu:
    from autopar.hardware.gpus import find

    try:
        return find(name)
    except UsageError as error:
        raise UsageError(f"--device {device}: none of auto, cpu and cuda, and {error}") from error


def _measured(
    user: UserModel, options: ProfileOptions, ranks: int | None, links: bool, progress: Progress
) -> tuple[Profile, Cluster | None]:
    from autopar.profiler import local_cluster, measure_links, profile
    from autopar.profiler.device import choose, count

    chosen = choose(options.device)
    ranks = _ranks(ranks, count(chosen) if chosen.type == "cuda" else None)
    measured = profile(user, options, progress)
    if ranks < 2 or not links:
        return measured, None
    progress(f"measuring links between {ranks} ranks", 0.0)
    found = measure_links(ranks, chosen.type, options.threads, progress=progress)
    return measured, local_cluster(found, measured.device, count(chosen))


def _estimated(
    user: UserModel,
    options: ProfileOptions,
    ranks: int | None,
    kinds: tuple[str | None, list[Gpu]],
    runs: Path | None,
    progress: Progress,
) -> tuple[Profile, Cluster | None]:
    """Return the profile of GPUs that are not there, and of one that is if that is asked; and a node of each kind."""
    from autopar.cli.estimating import GPUS_PER_NODE, estimated
    from autopar.cli.kinds import Origin, joined
    from autopar.hardware.clusters import cluster_named
    from autopar.hardware.gpus import GPUS, known_as
    from autopar.profiler.device import choose
    from autopar.profiler.subject import prepare

    here, gpus = kinds
    if here is not None:
        choose(here)
    subject = prepare(user, options, progress)
    found = [Origin(f"--device {gpu.name}", estimated(subject, gpu, options, runs, progress)) for gpu in gpus]
    if here is not None:
        from autopar.profiler.profile import measured

        # Last, for measuring moves the model to the device.
        found.insert(0, Origin(f"--device {here}", measured(subject, options, progress)))
    names = [known_as(origin.profile.device.name) for origin in found]
    cluster = None
    if set(names) <= {gpu.name for gpu in GPUS}:
        cluster = cluster_named("+".join(f"{GPUS_PER_NODE if ranks is None else ranks}x{name}" for name in names))
    return joined(found), cluster


def _ranks(asked: int | None, gpus: int | None) -> int:
    if asked is not None and asked < 2:
        raise UsageError(f"--ranks {asked}: links connect at least 2 ranks")
    if gpus is not None and asked is not None and asked > gpus:
        raise UsageError(f"--ranks {asked}: this machine has {gpus} GPUs")
    return asked if asked is not None else gpus if gpus is not None else 2


def _probed(path: Path) -> Cluster | None:
    """Return the cluster in a file if `autopar cluster probe` measured it, which took more than is measured here."""
    from autopar.formats.cluster import PROBED, Cluster

    try:
        found = Cluster.load(path)
    except FileError:
        return None
    return found if found.name == PROBED else None


def _show(profile: Profile, output: Path, links: Path, kept: Cluster | None, *, written: bool) -> None:
    from autopar.report.profile import render

    console = screen()
    render(profile, console)
    files = f"{output} and {links}" if written else str(output)
    lines = [f"Written: {files}; `autopar plan {output}` plans with {'them' if written else 'it'}"]
    if kept is not None:
        lines.append(
            f"Kept: {links}, which `autopar cluster probe` wrote{_other(kept, profile)}; --overwrite replaces it"
        )
    beside = output.parent / _CLUSTER
    if kept is None and beside.exists() and not (written and beside == links):
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
