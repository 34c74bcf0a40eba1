"""Inputs: profiles, clusters and plans as they are read from files, and what a plan's file says it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cache import users_cache
from autopar.code import code_of_file
from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import TRANSFORMERS, Profile, is_model, path_of, with_path
from autopar.formats.program import RECEIVES, REDUCTIONS, SENDS, Action, Program, RankProgram
from autopar.formats.references import named_file, resolve
from autopar.progress import Progress, no_progress

if TYPE_CHECKING:
    from autopar.planner import PlanOptions


MOST_ACTIONS = 2**22
"""About 2 GiB of timeline, and a minute."""
MANY_ACTIONS = 2**17
"""Some seconds."""


def read_profile(path: Path) -> Profile:
    """Read a profile to plan for.

    Raises:
        FileError: the file is malformed, or its layers are not those of one model.
    """
    return check_connected(Profile.load(path), path)


def check_connected(profile: Profile, path: Path) -> Profile:
    """Return a profile whose layers are all connected with the last one, which computes the loss.

    Raises:
        FileError: some are not; names them.
    """
    apart = profile.disconnected_layers()
    if apart:
        names = ", ".join(apart[:3]) + (f" and {len(apart) - 3} more" if len(apart) > 3 else "")
        raise FileError(
            f"{path}: $.tensors: no tensor connects {names} with the last layer, {profile.layers[-1].name}; list what "
            "layers send each other, or profile models apart"
        )
    return profile


def cluster_file(cluster_name: str | None, profile: Path) -> Path | None:
    """Return the file that describes the cluster to plan for; None where a built-in one is named.

    Raises:
        UsageError: the name is empty.
    """
    from autopar.hardware.clusters import is_file

    if cluster_name == "":
        raise UsageError("`cluster=''`: name a file or a cluster, such as 8xH100 (`autopar cluster list`)")
    if cluster_name is None:
        return profile.parent / "cluster.json"
    return Path(cluster_name) if is_file(cluster_name) else None


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
    folders = source.startswith(TRANSFORMERS)
    model = named_file(path, recorded, "model.source", folders=folders, is_known=_was_captured)
    return with_path(source, str(model))


def _was_captured(path: Path) -> bool:
    """Tell whether this user has captured a model file, with the files that it imports now, on this machine."""
    known = users_cache()
    if known is None or not path.is_file():
        return False
    code = code_of_file(path)
    return known.knows(code.sha256, code.imports)


def data_of(plan: Plan, path: Path) -> Path | None:
    """Return the file that feeds the hf: model of a plan that was read from ``path``, if it has one.

    Raises:
        FileError: as :func:`model_of`.
    """
    return None if plan.model.data is None else named_file(path, plan.model.data, "model.data")


def program_of(path: str | Path | None, plan: Plan) -> Program | None:
    """Return the program of a file, if one is named, to be simulated; it is checked against its plan.

    Raises:
        ProgramError: it does not carry out the plan, or moves reductions, which runs do and simulations do not.
    """
    from autopar.schedules.check import ProgramError, read_program
    from autopar.schedules.expand import expand

    if path is None:
        return None
    program = read_program(Path(path), plan)
    if program.shift:
        # Their order is kept.
        return program
    for rank, (actions, planned) in enumerate(zip(program.ranks, expand(plan).ranks, strict=True)):
        if _closing(actions) != _closing(planned):
            raise ProgramError(
                f"{path}: rank {rank}: reductions stand elsewhere than in the plan's own program, which `autopar run` "
                "performs, but nobody simulates; leave them behind the last backward, in their order"
            )
    return program


def _closing(actions: RankProgram) -> list[Action]:
    """Return the reductions of a rank, and what it computes behind the first of them."""
    every = [*actions]
    first = next((at for at, action in enumerate(every) if action.kind in REDUCTIONS), len(every))
    return [action for action in every[first:] if action.kind not in (*SENDS, *RECEIVES)]


def read_inputs(
    plan: Plan | str | Path,
    profile: Profile | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
    times_of: str | None = None,
    progress: Progress = no_progress,
) -> tuple[Plan, Profile, Cluster]:
    """Return a plan, and what it was made of: what is given, what it knows, or what its file records.

    Raises:
        FileError: a file is missing, malformed, or no longer what it was when the plan was made.
        UsageError: the program is too long to be listed action by action, or ``times_of`` stands for nothing.
    """
    loaded_plan, path = open_plan(plan)
    # Plans of the API know it.
    known = getattr(plan, "origin", None) or (None, None)
    return resolve_inputs(loaded_plan, path, profile or known[0], cluster or known[1], times_of, progress)


def resolve_inputs(
    loaded_plan: Plan,
    plan: Path,
    profile: Profile | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
    times_of: str | None = None,
    progress: Progress = no_progress,
) -> tuple[Plan, Profile, Cluster]:
    """Return :func:`read_inputs` of a plan that has been read from the file ``plan``."""
    from autopar.hardware.kinds import check_times_of

    _check_length(loaded_plan, plan, progress)
    measured, found = made_of(loaded_plan, plan, profile, cluster)
    if times_of is not None:
        check_times_of(measured, found, times_of)
        loaded_plan = loaded_plan.model_copy(update={"times_of": times_of})
    return loaded_plan, measured, found


def made_of(
    loaded_plan: Plan,
    plan: Path,
    profile: Profile | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
) -> tuple[Profile, Cluster]:
    """Return what a plan that was read from the file ``plan`` was made of, or what takes its place.

    Raises:
        FileError: a file is missing, malformed, or no longer what it was when the plan was made.
    """
    measured = _profile(loaded_plan, plan) if profile is None else given_profile(profile)
    return measured, _cluster(loaded_plan, plan, measured) if cluster is None else given_cluster(cluster)


def given_profile(profile: Profile | str | Path) -> Profile:
    """Return a profile, or that of a file.

    Raises:
        FileError: the file is missing or malformed.
    """
    return profile if isinstance(profile, Profile) else Profile.load(Path(profile))


def given_cluster(cluster: Cluster | str | Path) -> Cluster:
    """Return a cluster, or that of a file or a name.

    Raises:
        UsageError: the name is not known.
        FileError: the file is malformed.
    """
    from autopar.hardware.clusters import find_cluster

    return cluster if isinstance(cluster, Cluster) else find_cluster(str(cluster))


def origin_of(plan: Plan | str | Path) -> tuple[Profile, Cluster]:
    """Return what a plan was made of: what it knows, or what its file records.

    Raises:
        FileError: as :func:`made_of`.
    """
    return made_of(*open_plan(plan), *(getattr(plan, "origin", None) or (None, None)))


def _check_length(loaded_plan: Plan, plan: Path, progress: Progress) -> None:
    """Refuse a program whose timeline fits no ordinary memory; say so where it takes a while."""
    from autopar.schedules.expand import action_count

    count = action_count(loaded_plan)
    size = f"{count:,} actions of {len(loaded_plan.devices):,} ranks"
    if count > MOST_ACTIONS:
        raise UsageError(
            f"{plan}: a timeline of {size} is not listed, only of up to {MOST_ACTIONS:,}; the plan holds what is "
            f"predicted of the step (`autopar show {plan}`), and one of fewer `micro_batches` or `gpus` can be listed"
        )
    if count > MANY_ACTIONS:
        progress(f"simulating {size}, one by one", 0.0)


def _profile(loaded_plan: Plan, plan: Path) -> Profile:
    if loaded_plan.profile is None:
        raise FileError(f"{plan}: $.profile: the plan records no profile; pass `profile`")
    return Profile.load(resolve(loaded_plan.profile, plan, "profile"))


def _cluster(loaded_plan: Plan, plan: Path, profile: Profile) -> Cluster:
    from autopar.hardware.clusters import cluster_named, read_cluster
    from autopar.hardware.kinds import estimated_cluster

    if loaded_plan.cluster_name is not None:
        try:
            return cluster_named(loaded_plan.cluster_name)
        except UsageError as error:
            raise FileError(f"{plan}: $.cluster_name: {error}") from error
    if loaded_plan.cluster is None:
        return estimated_cluster(profile, max(loaded_plan.devices) + 1)
    return read_cluster(resolve(loaded_plan.cluster, plan, "cluster"))


def open_plan(plan: Plan | str | Path, seed: int | None = None) -> tuple[Plan, Path]:
    """Return a plan, with another run seed if one is given, and the file that what it names is relative to."""
    loaded_plan = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    return loaded_plan if seed is None else loaded_plan.model_copy(update={"seed": seed}), planned_file(plan)


def planned_file(plan: Plan | str | Path) -> Path:
    """Return the file that what a plan names is relative to."""
    return Path("plan.json") if isinstance(plan, Plan) else Path(plan)


def model_inputs(plan: Plan | str | Path, seed: int | None = None) -> tuple[Plan, str, Path | None]:
    """Return a plan, its MODEL, and the file that feeds an ``hf:`` one; what is missing is found before torch loads."""
    planned, path = open_plan(plan, seed)
    return planned, model_of(planned, path), data_of(planned, path)


def resolve_machines(
    profile: Profile | str | Path, cluster: Cluster | str | Path | None, options: PlanOptions
) -> tuple[Profile, Cluster]:
    """Return the profile to plan for, and the machines; estimated ones where none are named."""
    from autopar.hardware.kinds import estimated_cluster

    measured = profile if isinstance(profile, Profile) else read_profile(Path(profile))
    return measured, estimated_cluster(measured, options.gpus or 1) if cluster is None else given_cluster(cluster)
