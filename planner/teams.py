"""Teams: how many devices may run a replica together (tensor parallelism), and which layers have anything to divide.

A profile says what a part of every layer costs in teams of some sizes. Of these, a search looks at those that the user
admits, that a node has the devices for, and that what runs a plan can run.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import UsageError
from autopar.formats.profile import Profile
from autopar.options.plan import PlanOptions, division_refusal
from autopar.ownership import SINGLE, Replicas
from autopar.planner.costs.forms import sliced_tensors

Span = tuple[int, int]
"""The first and the last of some layers."""


def team_choices(profile: Profile, most: int, options: PlanOptions) -> tuple[Replicas, ...]:
    """Return a replica of every sort that a search looks at: single devices first, then teams by their size.

    Args:
        profile: says how layers split, and what parts cost.
        most: devices that a team may have.
        options: say which sizes, and whether teams keep slices of the sequence.

    Raises:
        UsageError: the size that is asked for cannot be.
    """
    asked = options.tensor
    sizes = [] if asked == 1 or division_refusal(profile) else [size for size in _priced_sizes(profile) if size <= most]
    some = [size for size in sizes if asked in ("auto", size)]
    teams = [team for size in some for team in _sorts(profile, size, options)]
    if not teams and options.stages is None:
        _check_needless(profile, most, options)
    return (*((SINGLE,) if asked in ("auto", 1) else ()), *teams) or (SINGLE,)


def _sorts(profile: Profile, size: int, options: PlanOptions) -> Iterator[Replicas]:
    how = options.sequence_parallel
    sliced = Replicas(team=size, sliced=True)
    known = how != "off" and bool(spans(profile, sliced))
    if how != "on":
        yield Replicas(team=size)
    if known and all(layer.on_team(size, sliced=True) is not None for layer in profile.layers):
        yield sliced


def _priced_sizes(profile: Profile) -> list[int]:
    """Return the sizes of teams of which a profile has costs, ascending."""
    counts = {split.count for layer in profile.layers for split in layer.splits if split.part is not None}
    return sorted(count for count in counts if all(layer.on_team(count) is not None for layer in profile.layers))


def _check_needless(profile: Profile, most: int, options: PlanOptions) -> None:
    """Refuse options of teams where there can be none.

    Raises:
        UsageError: names the option, and what to do.
    """
    for name, value in options.asked_of_teams.items():
        why, remedy = _obstacle(profile, most, options)
        raise UsageError(f"`{name}={value!r}`: {why}; {remedy}, or leave out `{name}`")


def _obstacle(profile: Profile, most: int, options: PlanOptions) -> tuple[str, str]:
    """Return why there can be no team as is asked for, and what would let it be."""
    priced = _priced_sizes(profile)
    some = [size for size in priced if options.tensor in ("auto", size)]
    if (refusal := division_refusal(profile)) is not None:
        reason, others = refusal
        return reason, f"profile with {others}"
    if some and min(some) > most:
        return f"no node has {min(some)} devices of a kind", "let teams be `across_nodes`"
    if some:
        return "nothing between the layers can be kept in slices", "pass `sequence_parallel='off'`"
    if not any(layer.splits for layer in profile.layers):
        why = next((f": {layer.split_obstacles[0]}" for layer in profile.layers if layer.split_obstacles), "")
        return f"no layer of {profile.model.source} splits{why}", "plan with `tensor=1`"
    known = f"in {', '.join(map(str, priced))} parts" if priced else "whole"
    count = "several" if options.tensor == "auto" else options.tensor
    return f"the profile says what layers cost {known} only, and not in {count}", "profile again with a larger `tensor`"


def spans(profile: Profile, team: Replicas) -> list[Span]:
    """Return ranges of layers of which a stage must hold one, for a team to have something to divide.

    Layers that split; where slices of the sequence are kept, those from which a tensor that is kept so goes to which.
    """
    splits = {layer.name: layer.split(team.team) for layer in profile.layers}
    if not team.sliced:
        return [(at, at) for at, layer in enumerate(profile.layers) if splits[layer.name] is not None]
    position = {layer.name: at for at, layer in enumerate(profile.layers)}
    kept = sliced_tensors(profile, splits)
    ends = ((tensor.producer, tensor.consumers) for tensor in profile.tensors if tensor.name in kept)
    return sorted({(position[made], max(position[name] for name in read)) for made, read in ends if made is not None})
