"""Machines: what commands say of the cluster that they plan for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.formats.cluster import Cluster


def echo(named: str | None, cluster: Cluster, console: Console) -> None:
    """Print in a line what was understood of ``--cluster``; nothing where none was named."""
    from autopar.hardware.clusters import is_file
    from autopar.hardware.collectives import NETWORK_SHARE
    from autopar.report.cluster import understood

    if named is not None:
        published = not is_file(named) or Path(named).suffix == ".toml"
        said = understood(cluster, NETWORK_SHARE if published else 1.0)
        console.print(f"cluster {named}: {said}", highlight=False, markup=False, soft_wrap=True)
