"""What the commands that plan are asked alike: for which profile, devices, links and batch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli import completion

ProfileFile = Annotated[Path, typer.Argument(help="What `autopar profile` measured.")]
Gpus = Annotated[int | None, typer.Option("--gpus", help="Use at most this many devices; default: all of the cluster.")]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Devices and links: a .json or .toml file, or a name such as 4x8xA100-80G:200Gbps "
        "(`autopar cluster list`); default: cluster.json beside the profile, else estimated.",
        autocompletion=completion.clusters,
    ),
]
Memory = Annotated[str | None, typer.Option("--memory", help="Limit per device, such as 16GiB.")]
Batch = Annotated[int | None, typer.Option("--batch", help="Samples per step; default: the profile's.")]
Bandwidth = Annotated[
    str | None, typer.Option("--bandwidth", help="Assume this bandwidth of every link, such as 25GB/s.")
]
TimesOf = Annotated[
    str | None,
    typer.Option(
        "--times-of",
        help="Let the profile's times of this kind of device, such as H100 or cpu, stand for kinds in the cluster that "
        "it has none of.",
    ),
]
