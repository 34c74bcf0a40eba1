"""Inputs: profiles, clusters and plans as they are read from files, and what a plan's file says it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.document import read_text
from autopar.formats.plan import Plan
from autopar.formats.profile import TRANSFORMERS, Profile, is_model, path_of, with_path
from autopar.formats.references import named_file, resolve
from autopar.progress import Progress, untold

if TYPE_CHECKING:
    from autopar.formats.timeline import Timeline


MOST_ACTIONS = 2**22
"""About 2 GiB of timeline, and a minute."""
MANY_ACTIONS = 2**17
"""Some seconds."""


def read_profile(path: Path) -> Profile:
    """Read a profile to plan for.

    Raises:
        FileError: the file is malformed, or its layers are not those of one model.
    """
    return connected(Profile.load(path), path)


def connected(profile: Profile, path: Path) -> Profile:
    """Return a profile whose layers are all connected with the last one, which computes the loss.

    Raises:
        FileError: some are not; names them.
    """
    apart = profile.apart()
    if apart:
        names = ", ".join(apart[:3]) + (f" and {len(apart) - 3} more" if len(apart) > 3 else "")
        raise FileError(
            f"{path}: $.tensors: no tensor connects {names} with the last layer, {profile.layers[-1].name}; list what "
            "layers send each other, or profile models apart"
        )
    return profile


def cluster_file(named: str | None, profile: Path) -> Path | None:
    """Return the file that describes the cluster to plan for; None where a built-in one is named.

    Raises:
        UsageError: the name is empty.
    """
    from autopar.hardware.clusters import is_file

    if named == "":
        raise UsageError("`cluster=''`: name a file or a cluster, such as 8xH100 (`autopar cluster list`)")
    if named is None:
        return profile.parent / "cluster.json"
    return Path(named) if is_file(named) else None


def machines(named: str | None, path: Path | None, profile: Profile, gpus: int | None) -> tuple[Cluster, str | None]:
    """Return the cluster and the text of its file; an estimated one if none was named and none lies there."""
    from autopar.hardware.clusters import cluster_named, described
    from autopar.planner.costs.kinds import estimated_cluster

    if path is None:
        return cluster_named(named or ""), None
    if named is None and not path.exists():
        return estimated_cluster(profile, gpus or 1), None
    text = read_text(path, Cluster.KIND)
    return described(text, path), text


def read_plan(path: Path, seed: int | None = None) -> Plan:
    """Read a plan, with another run seed if one is given."""
    plan = Plan.load(path)
    return plan if seed is None else plan.model_copy(update={"seed": seed})


def model_of(plan: Plan, path: Path) -> str:
    """Return MODEL of a plan that was read from ``path``: file paths are relative to the plan.

    Raises:
        FileError: the model file is not there, or not where a plan may name one.
    """
    source = plan.model.source
    recorded = path_of(source)
    if recorded is None:
        return source
    if not is_model(source):
        raise FileError(
            f"{path}: $.model.source: expected a .py file, hf: and a configuration, or package.module:factory, "
            f"found {source!r}"
        )
    model = named_file(path, recorded, "model.source", folders=source.startswith(TRANSFORMERS))
    return with_path(source, str(model))


def data_of(plan: Plan, path: Path) -> Path | None:
    """Return the file that feeds the hf: model of a plan that was read from ``path``, if it has one.

    Raises:
        FileError: as :func:`model_of`.
    """
    return None if plan.model.data is None else named_file(path, plan.model.data, "model.data")


def predict(
    plan: Path, profile: Path | None = None, cluster: str | None = None, progress: Progress = untold
) -> Timeline:
    """Return the predicted timeline of a plan file; what is not given is what the plan records.

    Raises:
        FileError: a file is missing, malformed, or no longer what it was when the plan was made.
        UsageError: the program is too long to be listed action by action.
    """
    from autopar.planner import simulate

    return simulate(*read_inputs(plan, profile, cluster, progress=progress))


def read_inputs(
    plan: Path,
    profile: Path | None = None,
    cluster: str | None = None,
    times_of: str | None = None,
    progress: Progress = untold,
) -> tuple[Plan, Profile, Cluster]:
    """Return a plan file's plan, and the profile and the cluster that it records, where no other is given.

    With ``times_of``, that kind of the profile's devices stands for others, in place of the one that the plan records.
    ``progress`` is told of a program that takes long to simulate.

    Raises:
        FileError: a file is missing, malformed, or no longer what it was when the plan was made.
        UsageError: the program is too long to be listed action by action, or ``times_of`` stands for nothing.
    """
    return planned_with(Plan.load(plan), plan, profile, cluster, times_of, progress)


def planned_with(
    planned: Plan,
    plan: Path,
    profile: Profile | str | Path | None = None,
    cluster: Cluster | str | None = None,
    times_of: str | None = None,
    progress: Progress = untold,
) -> tuple[Plan, Profile, Cluster]:
    """Return :func:`read_inputs` of a plan that has been read from the file ``plan``."""
    from autopar.planner.costs.kinds import check_times_of

    _check_length(planned, plan, progress)
    measured = profile if isinstance(profile, Profile) else _profile(planned, plan, profile)
    found = cluster if isinstance(cluster, Cluster) else _cluster(planned, plan, cluster, measured)
    if times_of is not None:
        check_times_of(measured, found, times_of)
        planned = planned.model_copy(update={"times_of": times_of})
    return planned, measured, found


def _check_length(planned: Plan, plan: Path, progress: Progress) -> None:
    """Refuse a program whose timeline fits no ordinary memory; say so where it takes a while."""
    from autopar.schedules.expand import action_count

    count = action_count(planned)
    size = f"{count:,} actions of {len(planned.devices):,} ranks"
    if count > MOST_ACTIONS:
        raise UsageError(
            f"{plan}: a timeline of {size} is not listed, only of up to {MOST_ACTIONS:,}; the plan holds what is "
            f"predicted of the step (`autopar show {plan}`), and one of fewer `micro_batches` or `gpus` can be listed"
        )
    if count > MANY_ACTIONS:
        progress(f"simulating {size}, one by one", 0.0)


def _profile(planned: Plan, plan: Path, given: str | Path | None) -> Profile:
    if given is not None:
        return Profile.load(Path(given))
    if planned.profile is None:
        raise FileError(f"{plan}: $.profile: the plan records no profile; pass `profile`")
    return Profile.load(resolve(planned.profile, plan, "profile"))


def _cluster(planned: Plan, plan: Path, given: str | None, profile: Profile) -> Cluster:
    from autopar.hardware.clusters import cluster_named, find_cluster, read_cluster
    from autopar.planner.costs.kinds import estimated_cluster

    if given is not None:
        return find_cluster(given)
    if planned.cluster_name is not None:
        try:
            return cluster_named(planned.cluster_name)
        except UsageError as error:
            raise FileError(f"{plan}: $.cluster_name: {error}") from error
    if planned.cluster is None:
        return estimated_cluster(profile, max(planned.devices) + 1)
    return read_cluster(resolve(planned.cluster, plan, "cluster"))
