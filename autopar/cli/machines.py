"""Machines: the cluster that a command plans for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.formats.cluster import Cluster
    from autopar.formats.profile import Profile

__all__ = ["described_in", "echo", "machines"]


def described_in(named: str | None, profile: Path) -> Path | None:
    """Return the file that describes the cluster; None where a built-in one is named.

    Raises:
        UsageError: the name is empty.
    """
    from autopar.errors import UsageError
    from autopar.hardware.clusters import is_file

    if named == "":
        raise UsageError("--cluster '': name a file or a cluster, such as 8xH100 (`autopar cluster list`)")
    if named is None:
        return profile.parent / "cluster.json"
    return Path(named) if is_file(named) else None


def machines(named: str | None, path: Path | None, profile: Profile, gpus: int | None) -> tuple[Cluster, str | None]:
    """Return the cluster and the text of its file; an estimated one if none was named and none lies there."""
    from autopar.formats.cluster import Cluster
    from autopar.formats.document import read_text
    from autopar.hardware.clusters import cluster_named, described
    from autopar.planner.estimate import estimated_cluster

    if path is None:
        return cluster_named(named or ""), None
    if named is None and not path.exists():
        return estimated_cluster(profile, gpus or 1), None
    text = read_text(path, Cluster.KIND)
    return described(text, path), text


def echo(named: str | None, cluster: Cluster, console: Console) -> None:
    """Print in a line what was understood of ``--cluster``; nothing where none was named."""
    from autopar.hardware.clusters import is_file
    from autopar.hardware.collectives import NETWORK_SHARE
    from autopar.report.cluster import understood

    if named is not None:
        published = not is_file(named) or Path(named).suffix == ".toml"
        said = understood(cluster, NETWORK_SHARE if published else 1.0)
        console.print(f"cluster {named}: {said}", highlight=False, markup=False, soft_wrap=True)
