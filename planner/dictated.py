"""Dictated: the stages that a user dictates: ``0-5:2,6-11:1``, ``wte-h.5:2x4,h.6-head``, ``0-11:2@H100+1@V100``.

Layers are named by index or name; a stage has some replicas, each on one device or on a team of several. What a profile
says of how layers split decides whether a team can run a stage, and which indices of parameters each of its ranks has.
Stages take devices in the cluster's order, of the kinds that are named, a team those of one node unless the user lets
teams cross.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.formats.cuts import ParameterCut
from autopar.formats.profile import Layer, Profile
from autopar.hardware.gpus import known_as
from autopar.options.plan import PlanOptions, division_refusal
from autopar.ownership import Replicas
from autopar.planner.candidate import Candidate, CandidateStage, splits_backward
from autopar.planner.costs.forms import slices_of
from autopar.planner.costs.model import CostModel


def position(name: str, names: Sequence[str]) -> int | None:
    """Return the index of a layer, None where there is none. A number is an index, even of layers named by numbers.

    A layer that joins modules is meant by each of them.

    >>> position("h", ["wte", "h"]), position("0", ["wte", "h"]), position("head", ["wte", "h"])
    (1, 0, None)
    >>> position("head", ["wte", "norm+head"])
    1
    """
    if re.fullmatch(r"\d{1,9}", name):
        return int(name) if int(name) < len(names) else None
    if name in names:
        return names.index(name)
    return next((index for index, each in enumerate(names) if name in each.split("+")), None)


def unknown(where: str, name: str, names: Sequence[str]) -> UsageError:
    """Return the error that no layer is meant by ``name``."""
    if re.fullmatch(r"\d+", name):
        return UsageError(f"{where} names layer {name}; the profile has layers 0..{len(names) - 1}")
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
    return UsageError(f"{where}: no layer is called {name!r}; nearest: {', '.join(near)}")


Typed = tuple[tuple[str, int], ...]
"""(type of device, replicas) of a stage; an empty type is any."""


class FixedStages(NamedTuple):
    """Where the stages end, how many replicas each has, and how many devices run each replica."""

    cuts: tuple[int, ...]
    widths: tuple[int, ...]
    team_sizes: tuple[int, ...]
    sliced: tuple[bool, ...] = ()
    """Whether teams keep slices of what is between layers; empty: none does."""
    types: tuple[Typed, ...] = ()
    """On what each stage's replicas run; empty: no kind is named."""

    @property
    def has_teams(self) -> bool:
        """Whether several devices run some replica."""
        return max(self.team_sizes) > 1

    @property
    def teams(self) -> tuple[Replicas, ...]:
        """A replica of every stage."""
        sliced = self.sliced or (False,) * len(self.cuts)
        return tuple(Replicas(team=size, sliced=own) for size, own in zip(self.team_sizes, sliced, strict=True))

    @property
    def replicas(self) -> tuple[Replicas, ...]:
        """Those of every stage, as far as they are dictated."""
        return tuple(one._replace(width=width) for width, one in zip(self.widths, self.teams, strict=True))


def pipelines_of(text: str, names: Sequence[str]) -> tuple[FixedStages, ...]:
    """Read the stages of every pipeline, of which several are apart by a slash; see :func:`parse`.

    >>> [each.cuts for each in pipelines_of("0-1,2/0,1-2", ["wte", "h", "head"])]
    [(2, 3), (1, 3)]
    """
    return tuple(parse(each, names) for each in text.split("/"))


def together(every: Sequence[FixedStages]) -> FixedStages:
    """Return the stages of several pipelines, one behind the other."""
    columns = zip(*every, strict=True)
    cuts, widths, team_sizes, sliced, types = (tuple(value for each in column for value in each) for column in columns)
    return FixedStages(cuts, widths, team_sizes, sliced, types)


def parse(text: str, names: Sequence[str]) -> FixedStages:
    """Read stages as layers:replicas, or layers:replicasxdevices of each replica; both numbers default to 1.

    Layers are one layer or first-last, by index or name. A number is an index, even where a layer is named by a number.
    Behind the numbers may stand ``@`` and a kind of device; those of several kinds are joined by ``+``.

    >>> parse("0-1:2x4,head", ["wte", "h", "head"])
    FixedStages(cuts=(2, 3), widths=(2, 1), team_sizes=(4, 1), sliced=(), types=())
    >>> parse("0-2:2@H100+1@V100", ["wte", "h", "head"])
    FixedStages(cuts=(3,), widths=(3,), team_sizes=(1,), sliced=(), types=((('H100', 2), ('V100', 1)),))

    Raises:
        UsageError: a layer is unknown, given twice or left out, or a number of replicas is none.
    """
    expected = 0
    found = []
    for index, part in enumerate(text.split(",")):
        layers, typed, team_size = _split(part.strip(), index)
        first, last = _range(layers, names, index)
        if last < first:
            raise UsageError(f"`stages`: stage {index} ({layers}) ends before it begins")
        if first > expected:
            missing = names[expected] if first == expected + 1 else f"{names[expected]}..{names[first - 1]}"
            raise UsageError(f"`stages`: {missing} is in no stage; stage {index} must begin with layer {expected}")
        if first < expected:
            raise UsageError(
                f"`stages`: layer {first} ({names[first]}) is in two stages; "
                f"stage {index} must begin with layer {expected}"
            )
        found.append((last + 1, sum(count for _, count in typed), team_size, typed))
        expected = last + 1
    if expected < len(names):
        raise UsageError(
            f"`stages`: {names[expected]}..{names[-1]} (layers {expected}-{len(names) - 1}) is in no stage"
        )
    cuts, widths, team_sizes, types = zip(*found, strict=True)
    named = any(name for typed in types for name, _ in typed)
    return FixedStages(cuts, widths, team_sizes, types=types if named else ())


def _split(part: str, index: int) -> tuple[str, Typed, int]:
    layers, _, numbers = (part if ":" in part else f"{part}:1").rpartition(":")
    terms = [re.fullmatch(r"([1-9][0-9]{0,5})(?:x([1-9][0-9]{0,5}))?(?:@(.+))?", each) for each in numbers.split("+")]
    found = [(each[3] or "", int(each[1]), int(each[2] or 1)) for each in terms if each is not None]
    if not layers or len(found) < len(terms) or (len(found) > 1 and not all(name for name, *_ in found)):
        raise UsageError(
            f"`stages`: stage {index} is {part!r}; write layers:replicas, such as 0-5:2, or with the devices that run "
            "each replica, 0-5:2x4, or with kinds of devices, 0-5:2@H100+1@V100"
        )
    team_sizes = {size for *_, size in found}
    if len(team_sizes) > 1:
        raise UsageError(
            f"`stages`: stage {index} is {part!r}: as many devices run every replica of a stage; give all "
            f"x{min(team_sizes)}"
        )
    return layers, tuple((name, count) for name, count, _ in found), team_sizes.pop()


def _range(layers: str, names: Sequence[str], index: int) -> tuple[int, int]:
    """Return the first and the last of one layer, or of two with a dash between; names may hold dashes, too."""
    dashes = [match.start() for match in re.finditer("-", layers)]
    readings = [(layers, layers), *((layers[:dash], layers[dash + 1 :]) for dash in dashes)]
    for sides in readings:
        first, last = (position(side, names) for side in sides)
        if first is not None and last is not None:
            return first, last
    name = next((side for side in readings[:2][-1] if position(side, names) is None), layers)
    raise unknown(f"`stages`: stage {index}", name, names)


def with_teams(profile: Profile, options: PlanOptions, stages: FixedStages) -> FixedStages:
    """Return dictated stages, with what each of their teams keeps in slices.

    Raises:
        UsageError: a stage, or the optimizer's step, does not split so; or no stage has a team that an option is of.
    """
    if not stages.has_teams:
        check_alone(options)
        return stages
    _check(profile, options, stages)
    if options.sequence_parallel != "on":
        return stages
    asked = tuple(
        CandidateStage(first, stop, tuple(range(size)), (1,), 1, team=size, sliced=size > 1)
        for first, stop, size in zip((0, *stages.cuts), stages.cuts, stages.team_sizes, strict=False)
    )
    sliced = tuple(bool(tensors) for tensors in slices_of(profile, asked))
    if not any(sliced):
        raise UsageError(
            "`sequence_parallel`: nothing between the layers of these stages can be kept in slices; leave it out"
        )
    return stages._replace(sliced=sliced)


def check_alone(options: PlanOptions) -> None:
    """Refuse options of stages with several devices a replica where there are none.

    Raises:
        UsageError: names the option.
    """
    for name in options.asked_of_teams:
        raise UsageError(f"`{name}` is of `stages` with several devices a replica, such as 0-5:2x4; leave it out")


def _check(profile: Profile, options: PlanOptions, stages: FixedStages) -> None:
    refusal = division_refusal(profile)
    if refusal is not None:
        reason, remedy = refusal
        raise UsageError(
            f"`stages` with several devices a replica: {reason}; give each replica one device, or profile with {remedy}"
        )
    for index, (first, stop) in enumerate(zip((0, *stages.cuts), stages.cuts, strict=False)):
        _check_splits(index, profile.layers[first:stop], stages.team_sizes[index])


def _check_splits(stage: int, layers: Sequence[Layer], count: int) -> None:
    """Refuse a stage of which nothing splits.

    Raises:
        UsageError: names the layer, and which numbers would do.
    """
    if count == 1 or any(layer.split(count) for layer in layers):
        return
    counts = sorted({split.count for layer in layers for split in layer.splits})
    do = f"the profile has splits in {', '.join(map(str, counts))}" if counts else "the profile has none of its layers"
    why = next((f"; {layer.name}: {layer.split_obstacles[0]}" for layer in layers if layer.split_obstacles), "")
    raise UsageError(
        f"`stages`: nothing in stage {stage} ({layers[0].name}..{layers[-1].name}) splits in {count} parts; {do}{why}"
    )


def positions(nodes: Sequence[int], groups: Iterable[Replicas], *, across: bool) -> list[int]:
    """Return which of some devices groups of stages take, one after the other, given the node of each.

    A team that does not fit what is left of a node begins with the next, unless teams may be ``across`` nodes.

    >>> positions((0, 0, 0, 1, 1), [Replicas(1), Replicas(2, team=2)], across=False)
    [0, 1, 2, 3, 4]
    >>> positions((0, 0, 1, 1), [Replicas(1), Replicas(1, team=2)], across=False)
    [0, 2, 3]

    Raises:
        UsageError: a team is on several nodes, or there are too few devices for all to be on one.
    """
    found: list[int] = []
    free = 0
    for index, group in enumerate(groups):
        for _ in range(group.width):
            start = free if across else _within_a_node(nodes, free, group.team)
            if start is None:
                raise UsageError(
                    f"`stages`: no node has {group.team} devices left for a replica of stage {index}, which add up in "
                    "every layer; give it fewer, or pass `across_nodes=True`"
                )
            free = start + group.team
            found += range(start, free)
    return found


def typed_positions(
    nodes: Sequence[int], types: Sequence[str], groups: Iterable[tuple[Replicas, Typed]], *, across: bool
) -> list[int]:
    """Return :meth:`positions` of groups whose replicas run on named types of devices, given the type of each.

    >>> typed_positions((0, 0, 1), ("A", "B", "A"), [(Replicas(2), (("B", 1), ("A", 1)))], across=False)
    [1, 0]

    Raises:
        UsageError: too few devices are of a type, or none of a node is left for a team.
    """
    free, found = list(range(len(nodes))), list[int]()
    for index, (group, typed) in enumerate(groups):
        for name, count in typed:
            for _ in range(count):
                own = [at for at in free if not name or known_as(types[at]) == known_as(name)]
                at = (
                    0
                    if across and len(own) >= group.team
                    else _within_a_node([nodes[each] for each in own], 0, group.team)
                )
                if at is None:
                    raise _too_few(index, name, types, group.team)
                found += own[at : at + group.team]
                free = [each for each in free if each not in own[at : at + group.team]]
    return found


def _too_few(index: int, name: str, types: Sequence[str], team: int) -> UsageError:
    known = sorted(set(types))
    if name and known_as(name) not in map(known_as, known):
        return UsageError(
            f"`stages`: stage {index} is on {name!r}, of which there is none; there are {', '.join(known)}"
        )
    there = sum(not name or known_as(each) == known_as(name) for each in types)
    what, kind = f"{team} devices of one node" if team > 1 else "device", name or "any kind"
    return UsageError(
        f"`stages`: no {what} of {kind} is left for a replica of stage {index}, of {there} that there are; give the "
        "stages fewer replicas"
    )


def _within_a_node(nodes: Sequence[int], free: int, size: int) -> int | None:
    """Return the first device from ``free`` on with which so many of one node begin; None where there is none."""
    starts = range(free, len(nodes) - size + 1)
    return next((start for start in starts if len(set(nodes[start : start + size])) == 1), None)


def check_forms(costs: CostModel, candidate: Candidate) -> None:
    """Refuse a candidate whose teams nothing prices, or whose schedule has what was not measured of parts.

    Raises:
        UsageError: says to profile again.
    """
    for stage in (each for each in candidate.stages if each.team > 1):
        halved = all(costs.layers[form].has_halves for form in costs.forms_of(stage))
        if splits_backward(candidate.schedule) and not halved:
            raise UsageError(
                f"`schedule={candidate.schedule!r}` has backwards in two halves, which the profile does not hold for "
                f"parts of layers {stage.layers_text()}; profile again, or choose gpipe, 1f1b or interleaved"
            )


def cuts_of(layers: Iterable[Layer], count: int) -> tuple[ParameterCut, ...]:
    """Return how the parameters of layers are cut in so many parts; those that several share are cut alike."""
    if count == 1:
        return ()
    splits = [split for layer in layers if (split := layer.split(count)) is not None]
    return tuple({cut.parameter: cut for split in splits for cut in split.cuts}.values())
