"""Constraints: the question that a user asks, and which stages the user admits, beside how many devices there are.

From options and the profile's layers, named by index or name, come rules on stages, and the stages that ``--stages``
dictates, such as ``0-5:2,6-11:1`` or ``wte-h.5:2,h.6-head``. Every solver asks the same rules. Layers have limits of
their own: how many samples of a micro-batch they take at once.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.formats.stage import group_of, layout_of
from autopar.hardware.gpus import known_as
from autopar.hardware.topology import devices_of
from autopar.options.plan import PLANNED, PlanOptions, admissible_options
from autopar.ownership import SINGLE, Replicas
from autopar.planner.candidate import (
    Candidate,
    CandidateStage,
    Family,
    Shape,
    equal_widths,
    families,
    has_chunks,
    plain,
)
from autopar.planner.costs.layers import ShareLimit
from autopar.planner.costs.model import CostModel
from autopar.planner.costs.queues import Flag, Positions
from autopar.planner.dictated import (
    FixedStages,
    pipelines_of,
    position,
    positions,
    together,
    typed_positions,
    unknown,
    with_teams,
)
from autopar.planner.order import as_listed, canonical
from autopar.planner.simulator.simulate import Simulator
from autopar.policies import POLICIES
from autopar.progress import Progress, no_progress


def crossed_limit(costs: CostModel, stages: Sequence[CandidateStage]) -> str | None:
    """Return what the shares of some stages do not obey; None if they may be so."""
    for stage, limit in product(stages, costs.share_limits):
        if limit.overlaps(stage.first, stage.stop) and not limit.admits(stage.shares):
            few = min(stage.shares) < limit.least
            return f"{limit.text}, and a replica is given {min(stage.shares) if few else max(stage.shares):g}"
    return None


def limits_met(costs: CostModel, shares: Sequence[float]) -> tuple[bool, ...]:
    """Return which of all limits replicas of these shares obey."""
    return tuple(limit.admits(shares) for limit in costs.share_limits)


def runnable(costs: CostModel, options: PlanOptions) -> list[Family]:
    """Return the families that the options admit and with whose micro-batches some plan obeys all limits.

    Raises:
        UsageError: there is none.
    """
    limits = {family: _unmet(costs, family) for family in families(costs.batch, options)}
    found = [family for family, limit in limits.items() if limit is None]
    if not found:
        few = max(limits, key=lambda family: family.micro_batch_size)
        limit = limits[few]
        assert limit is not None
        fewer, count = few.micro_batch_size < limit.least, few.micro_batches
        raise UsageError(
            f"{limit.text}; no plan gives it so many with {count} micro-batch{'es' if count > 1 else ''} of "
            f"{few.micro_batch_size} and {len(costs.devices)} device{'s' if len(costs.devices) > 1 else ''}: give "
            f"{'fewer' if fewer else 'more'} `micro_batches` or another `batch`"
        )
    return found


def _unmet(costs: CostModel, family: Family) -> ShareLimit | None:
    """Return the first limit that no plan of a family obeys, not even with replicas on all devices."""
    rows, devices = family.micro_batch_size, len(costs.devices)
    most = max(costs.shares(rows, Replicas(devices if costs.divisible else min(devices, rows))))
    return next((each for each in costs.share_limits if rows < each.least or most > each.most), None)


_PIN = re.compile(r"(?P<layers>.+?)\s+(?:(?P<how>same stage|different stages)|on\s+(?P<type>\S.*))")
_FORMS = "write 'a,b same stage', 'a,b different stages' or 'a on TYPE', with layers by name or index"


class Rule(NamedTuple):
    """One thing that the user states, or that a model needs."""

    text: str
    """As on the command line."""
    how: Literal["together", "apart", "on", "counted", "single", "shares", "divided"]
    layers: tuple[int, ...] = ()
    """Ascending: all in one stage, no two in one stage, all on devices of some kinds, or each of one replica."""
    kinds: frozenset[int] = frozenset()
    least: int = 1
    most: int = 2**31
    """Stages, where these are counted."""
    reasons: tuple[str, ...] = ()
    """Of layers of one replica, in their order."""
    limit: ShareLimit | None = None
    """Of the shares of micro-batches that the layers are given."""
    team: Replicas = SINGLE
    """Of which a stage has something to divide."""
    stops: tuple[int, ...] = ()
    """By first layer, the least stop of a stage that has; more than there are where none does."""

    @property
    def refusal(self) -> str:
        """What is said to a user whose stages do not obey it."""
        if self.how == "shares":
            return f"`stages`: {self.text}; give its stage other replicas, or other `micro_batches`"
        return f"`stages`: {self.text}" if self.how == "single" else f"`stages` contradicts {self.text}"

    def allows(self, first: int, stop: int, kinds: Sequence[int], shares: Sequence[float], replicas: Replicas) -> bool:
        """Whether layers ``first:stop`` may be a stage on devices of these kinds, of replicas with these shares."""
        return not (self.is_of(kinds, shares, replicas) and self.forbids(first, stop))

    def is_of(self, kinds: Sequence[int], shares: Sequence[float], replicas: Replicas) -> bool:
        """Whether it forbids any stages on devices of these kinds, of replicas with these shares."""
        if self.how == "divided":
            return (replicas.team, replicas.sliced) == (self.team.team, self.team.sliced)
        if self.how == "single":
            return max(len(shares), replicas.width) > 1
        if self.limit is not None:
            return bool(shares) and not self.limit.admits(shares)
        return self.how in ("together", "apart") or (self.how == "on" and not self.kinds.issuperset(kinds))

    def forbids(self, first: Positions, stop: Positions) -> Flag:
        """Whether layers ``first:stop`` are no stage, of those that it is of; positions may be arrays."""
        if self.how == "divided":
            return stop < (self.stops[first] if isinstance(first, int) else np.array(self.stops)[first])
        if self.how == "together":
            low, high = self.layers[0], self.layers[-1]
            return ((low < first) & (first <= high)) | ((low < stop) & (stop <= high))
        held = np.searchsorted(self.layers, stop) - np.searchsorted(self.layers, first)
        return np.asarray(held > (self.how == "apart"))

    def _of(self, stage: CandidateStage) -> Rule:
        """Return the rule of one replica for the first layer of a stage that it concerns."""
        named = zip(self.layers, self.reasons, strict=True)
        return self._replace(text=next(reason for layer, reason in named if stage.first <= layer < stage.stop))


def refusal_of_all(broken: Sequence[Rule | None]) -> str | None:
    """Return why stages are refused that break a rule in every family; none where they may be in one."""
    first = broken[0]
    return None if first is None or None in broken else first.refusal


@dataclass(frozen=True)
class Constraints:
    """All rules of a plan's stages; every solver obeys them."""

    layers: int
    kinds: tuple[int, ...]
    """Of the devices that are there, ascending."""
    rules: tuple[Rule, ...] = ()

    @property
    def least_stages(self) -> int:
        """Fewest stages of a plan."""
        return max((rule.least for rule in self.rules), default=1)

    @property
    def most_stages(self) -> int:
        """Most stages of a plan; never more than there are layers."""
        return min((self.layers, *(rule.most for rule in self.rules)))

    @classmethod
    def of(cls, costs: CostModel, options: PlanOptions, chunks: int = 1) -> Constraints:
        """Read what the options say of the stages of a model, ``chunks`` of which a device may run.

        Raises:
            UsageError: a layer or type of device is unknown, or no stages obey all rules.
        """
        names = [layer.name for layer in costs.profile.layers]
        rules = [_forbid_cut_rule(text, names) for text in options.forbid_cut]
        rules += [_pin_rule(text, names, costs) for text in options.pin]
        if options.min_stages > 1:
            rules.append(Rule(f"`min_stages={options.min_stages}`", "counted", least=options.min_stages))
        if options.max_stages is not None:
            rules.append(Rule(f"`max_stages={options.max_stages}`", "counted", most=options.max_stages))
        if costs.single:
            reasons = tuple("".join(each) for each in costs.single.values())
            rules.append(Rule(reasons[0], "single", tuple(costs.single), reasons=reasons))
        rules += [Rule(limit.text, "shares", limit.layers, limit=limit) for limit in costs.share_limits]
        rules += [_team_rule(costs, team) for team in costs.teams if team.team > 1]
        count = len(costs.devices)
        rules.append(Rule(f"{count} device{'s' if count > 1 else ''}", "counted", most=count * chunks))
        found = cls(len(names), tuple(sorted(set(costs.kind_of))), tuple(rules))
        if not found._possible():
            raise found._contradiction()
        return found

    def possible_on(self, kind_of: Sequence[int]) -> bool:
        """Whether some division of the layers obeys all rules on some of the devices, of these kinds."""
        fewer = Rule("", "counted", most=len(kind_of))
        return replace(self, kinds=tuple(sorted(set(kind_of))), rules=(*self.rules, fewer))._possible()

    def dictated(self) -> Constraints:
        """Return those of stages that are given, whose teams were held against the profile when they were read."""
        return replace(self, rules=tuple(rule for rule in self.rules if rule.how != "divided"))

    def allows(
        self, first: int, stop: int, kinds: Sequence[int], shares: Sequence[float], replicas: Replicas = SINGLE
    ) -> bool:
        """Whether layers ``first:stop`` may be a stage on devices of these kinds, of replicas with these shares."""
        return all(rule.allows(first, stop, kinds, shares, replicas) for rule in self.rules)

    def mask(
        self, kinds: Sequence[int], shares: Sequence[float] = (), replicas: Replicas = SINGLE
    ) -> npt.NDArray[np.bool_]:
        """Return :meth:`allows` of all stages, ``[first, stop]``; without shares, of any that are some stage's."""
        firsts, stops = np.arange(self.layers)[:, None], np.arange(self.layers + 1)
        found = firsts < stops
        for rule in self.rules:
            if rule.is_of(kinds, shares, replicas):
                found &= np.logical_not(rule.forbids(firsts, stops))
        return found

    def edges(self, most: int) -> list[int]:
        """Return where stages may end, 0 and the last included; of more than about ``most``, some that are spread out.

        Those next to a layer that a rule names are among them.
        """
        allowed = np.logical_or.reduce([self.mask((kind,)) for kind in self.kinds])
        every = [0, *(np.nonzero(allowed.any(axis=0))[0].tolist())]
        if len(every) <= most + 1:
            return every
        kept = {every[round(index * (len(every) - 1) / most)] for index in range(most + 1)}
        for rule in self.rules:
            for layer in rule.layers:
                after = bisect_right(every, layer)
                kept.update(every[after - 1 : after + 1])
        return sorted(kept)

    def broken(self, stages: Sequence[CandidateStage], kind_of: Sequence[int]) -> Rule | None:
        """Return the first rule that a plan's stages do not obey; ``kind_of`` are the kinds of all devices."""
        for rule in self.rules:
            if not rule.least <= len(stages) <= rule.most:
                return rule
            for stage in stages:
                kinds = [kind_of[device] for device in stage.devices]
                if not rule.allows(stage.first, stage.stop, kinds, stage.shares, stage.replicas):
                    return rule._of(stage) if rule.how == "single" else rule
        return None

    def _possible(self) -> bool:
        """Whether some division of the layers into stages obeys all rules."""
        if all(rule.how in ("counted", "divided") for rule in self.rules):
            # Too few layers or devices are a matter of the model and the machines, and no contradiction.
            return True
        allowed = np.logical_or.reduce([self.mask((kind,)) for kind in self.kinds])
        # By layer, the numbers of stages that may end before it, as the bits of an integer.
        counts = [1] + [0] * self.layers
        for stop in range(1, self.layers + 1):
            for first in np.nonzero(allowed[:, stop])[0].tolist():
                counts[stop] |= counts[first] << 1
        return any(counts[-1] >> count & 1 for count in range(self.least_stages, self.most_stages + 1))

    def _contradiction(self) -> UsageError:
        """Name rules that contradict each other, and none that could be left out."""
        named = self.rules
        for rule in self.rules:
            fewer = tuple(each for each in named if each is not rule)
            if not replace(self, rules=fewer)._possible():
                named = fewer
        texts = [rule.text for rule in named]
        if len(texts) == 1:
            return UsageError(f"{texts[0]}: no division of {self.layers} layers into stages obeys it")
        return UsageError(
            f"no division of {self.layers} layers into stages obeys {', '.join(texts[:-1])} and {texts[-1]} at once; "
            "drop or change one of them"
        )


def _team_rule(costs: CostModel, team: Replicas) -> Rule:
    """Return that a stage needs something that its teams divide."""
    what = (
        "nothing between them can be kept in slices" if team.sliced else f"nothing of them splits in {team.team} parts"
    )
    stops = np.full(costs.layer_count, costs.layer_count + 1)
    for low, high in costs.spans[team]:
        stops[low] = min(stops[low], high + 1)
    least = np.minimum.accumulate(stops[::-1])[::-1]
    return Rule(f"a stage has layers of which {what}", "divided", team=team, stops=tuple(least.tolist()))


def _layer(where: str, name: str, names: Sequence[str]) -> int:
    found = position(name, names)
    if found is None:
        raise unknown(where, name, names)
    return found


def _forbid_cut_rule(text: str, names: Sequence[str]) -> Rule:
    """Read a layer that no stage may end with: it and the next one stay together."""
    where = f"`forbid_cut={text!r}`"
    layer = _layer(where, text.strip(), names)
    if layer == len(names) - 1:
        raise UsageError(f"{where}: {names[layer]} is the last layer, and the last stage has to end with it")
    return Rule(where, "together", (layer, layer + 1))


def _pin_rule(text: str, names: Sequence[str], costs: CostModel) -> Rule:
    where = f"`pin={text!r}`"
    match = _PIN.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{where}: {_FORMS}")
    layers = tuple(sorted({_layer(where, name.strip(), names) for name in match["layers"].split(",")}))
    if match["type"] is not None:
        return Rule(where, "on", layers, _kinds(where, match["type"], costs))
    if len(layers) < 2:
        raise UsageError(f"{where} names one layer; {_FORMS}")
    return Rule(where, "together" if match["how"] == "same stage" else "apart", layers)


def _kinds(where: str, name: str, costs: CostModel) -> frozenset[int]:
    """The kinds of the devices that a name is the type of, in the cluster or in the profile."""
    found = {
        kind
        for device, kind in zip(costs.devices, costs.kind_of, strict=True)
        if known_as(name) in (known_as(device.type), known_as(costs.kinds[kind].name), costs.kinds[kind].type)
    }
    if not found:
        known = sorted({device.type for device in costs.devices} | {costs.kinds[kind].name for kind in costs.kind_of})
        raise UsageError(f"{where}: no device to plan for is called {name!r}; there are {', '.join(known)}")
    return frozenset(found)


def too_wide(fixed_stages: FixedStages, batch: int, options: PlanOptions) -> UsageError:
    """Return the error that dictated stages have more replicas than micro-batches have samples, or than there are."""
    most = max(fixed_stages.widths)
    if options.division == "round-robin":
        more = "" if options.micro_batches is None else "more `micro_batches`, "
        return UsageError(
            f"`stages`: a stage has {most} replicas, which cannot each take whole micro-batches in turn of the batch "
            f"{batch}; use {more}fewer replicas, a larger `batch`, or leave out `division`"
        )
    in_turn = (
        options.micro_batches is not None and most <= options.micro_batches and options.schedule in ("auto", *PLANNED)
    )
    return UsageError(
        f"`stages`: a stage has {most} replicas, more than the samples of a micro-batch of the batch {batch}; use "
        f"fewer replicas or micro-batches, or a larger `batch`"
        + (", or have them take whole micro-batches in turn: `division='round-robin'`" if in_turn else "")
    )


def shape_of(fixed_stages: FixedStages, options: PlanOptions) -> Shape:
    """Return dictated stages as groups of devices.

    Raises:
        UsageError: the stages do not go round the groups, or to and fro, each with the replicas of its group.
    """
    cuts, widths, teams = fixed_stages.cuts, fixed_stages.widths, fixed_stages.teams
    every = fixed_stages.replicas
    if not has_chunks(options.schedule):
        return Shape(cuts, every)
    asked = options.chunks or (2 if layout_of(options.schedule) == "vee" else None)
    for chunks in range(2, len(cuts) + 1) if asked is None else (asked,):
        groups = len(cuts) // chunks
        if groups * chunks == len(cuts) and groups > 0:
            places = [group_of(layout_of(options.schedule), at, groups) for at in range(len(cuts))]
            types = fixed_stages.types or ((),) * len(cuts)
            alike = list(zip(widths, (each.team for each in teams), types, strict=True))
            if all(alike[at] == alike[own] for own, at in enumerate(places)):
                return Shape(cuts, every[:groups])
    how = "in which the replicas of the first stages repeat" if asked is None else f"{asked} for every group of devices"
    raise UsageError(
        f"`stages`: {options.schedule} has several stages on the same devices, {how}; found {len(cuts)} stages of "
        f"{', '.join(map(str, widths))} replicas"
        + (f", on {', '.join(map(str, fixed_stages.team_sizes))} devices each" if fixed_stages.has_teams else "")
    )


def order_of(costs: CostModel, fixed_stages: FixedStages, options: PlanOptions) -> list[int]:
    """Return devices in the order in which dictated stages take them, that of the cluster as far as teams can.

    Raises:
        UsageError: no node has as many devices left as a team needs.
    """
    listed = as_listed(costs)
    nodes = [costs.links.topology.nodes[device] for device in listed]
    taken = _devices_taken(nodes, [costs.devices[device].type for device in listed], fixed_stages, options)
    return list(dict.fromkeys((*map(listed.__getitem__, taken), *listed)))


def _devices_taken(
    nodes: Sequence[int], types: Sequence[str], fixed_stages: FixedStages, options: PlanOptions
) -> list[int]:
    """Return which devices of some nodes and types the groups of dictated stages take."""
    groups = _groups(fixed_stages, options)
    if not fixed_stages.types:
        return positions(nodes, groups, across=options.across_nodes)
    return typed_positions(nodes, types, zip(groups, fixed_stages.types, strict=False), across=options.across_nodes)


def _groups(fixed_stages: FixedStages, options: PlanOptions) -> list[Replicas]:
    """Return how every group of devices runs its stages."""
    return list((fixed_stages if options.schedule == "auto" else shape_of(fixed_stages, options)).replicas)


@dataclass(frozen=True)
class Question:
    """A profile and a cluster, as the simulator prices them, and what the user asks of their plan."""

    simulator: Simulator
    options: PlanOptions
    fixed_stages: FixedStages | None = None
    """Stages that the user dictates, those of several pipelines one behind the other."""
    pipelines: tuple[FixedStages, ...] = ()
    """The stages of each pipeline."""

    @classmethod
    def of(cls, profile: Profile, cluster: Cluster, options: PlanOptions, progress: Progress = no_progress) -> Question:
        """Read what the user asks.

        Raises:
            UsageError: the options contradict the profile, the cluster or each other.
        """
        names = [layer.name for layer in profile.layers]
        pipelines = () if options.stages is None else pipelines_of(options.stages, names)
        check_pipelines(pipelines, options)
        fixed_stages = together(pipelines) if pipelines else None
        if fixed_stages is not None:
            fixed_stages = with_teams(profile, options, fixed_stages)
            options = _options_for_stages(fixed_stages, options, cluster)
        options = replace(options, gpus=options.gpus or len(cluster.devices))
        costs = canonical(CostModel(profile, cluster, options))
        question = cls(Simulator(costs, progress=progress), options, fixed_stages, pipelines)
        question._check_stages()
        return question

    @property
    def costs(self) -> CostModel:
        """Prices of the profile on the cluster."""
        return self.simulator.costs

    @cached_property
    def device_order(self) -> list[int]:
        """Devices in the order in which dictated stages take them, which is the cluster's."""
        return (
            as_listed(self.costs)
            if self.fixed_stages is None
            else order_of(self.costs, self.fixed_stages, self.options)
        )

    @cached_property
    def families(self) -> list[Family]:
        """Those that the options admit, some plan of which can run."""
        return runnable(self.costs, self.options)

    @cached_property
    def constraints(self) -> Callable[[int], Constraints]:
        """What the options forbid of stages, by how many of them a device runs."""
        return cache(partial(Constraints.of, self.costs, self.options))

    def with_teams(self, teams: tuple[Replicas, ...]) -> Question:
        """Return the question of plans whose replicas are of some sorts only."""
        costs = self.costs.with_teams(teams)
        return replace(self, simulator=self.simulator.priced_by(costs))

    def with_kinds_apart(self) -> Question:
        """Return the question of plans whose stages each have devices of one kind."""
        return replace(self, simulator=self.simulator.priced_by(self.costs.with_kinds_apart()))

    def under(self, options: PlanOptions) -> Question:
        """Return the question of the same profile and cluster, priced anew, with other options.

        Raises:
            UsageError: these contradict the profile.
        """
        options = admissible_options(options, self.costs.profile)
        costs = canonical(CostModel(self.costs.profile, self.costs.cluster, options))
        return Question(Simulator(costs), options, self.fixed_stages, self.pipelines)

    def excluding_option(self, candidate: Candidate) -> str | None:
        """Return the option that excludes a plan of others; None where it may be chosen."""
        costs, options, stages = self.costs, self.options, candidate.stages
        shards = {stage.shard for stage in stages if stage.replicas.width > 1}
        chunks = len(stages) // len({stage.devices for stage in stages})
        broken = self.constraints(chunks).broken(stages, costs.kind_of)
        if broken is not None:
            return broken.text
        excludes = {
            "`use_all`": options.use_all and len(set(candidate.devices)) < len(costs.devices),
            f"`shard={options.shard!r}`": options.shard != "auto" and not shards <= {options.shard},
            f"`schedule={options.schedule!r}`": not _as_asked(options.schedule, candidate),
            f"`recompute={options.recompute!r}`": options.recompute != "auto"
            and _recomputes(costs, candidate) != options.recompute,
            "`equal_widths`": options.equal_widths and not equal_widths(stages),
            f"`tensor={options.tensor!r}`": options.tensor != "auto"
            and any(stage.team != options.tensor for stage in stages),
        }
        return next((option for option, excluding in excludes.items() if excluding), None)

    def _check_stages(self) -> None:
        """Refuse more stages than can be."""
        layers, devices = self.costs.layer_count, len(self.costs.devices)
        most, on = min(layers, devices), f" on {devices} devices"
        if self.options.schedule != "auto" and has_chunks(self.options.schedule):
            most, on = layers, ""
        if self.options.min_stages > most:
            raise UsageError(f"`min_stages={self.options.min_stages}`: {layers} layers{on} make at most {most} stages")


def check_pipelines(pipelines: Sequence[FixedStages], options: PlanOptions) -> None:
    """Refuse several pipelines under a policy that trains one, and what several do not have.

    Raises:
        UsageError: says what to do.
    """
    several = "0-5,6-11/0-2,3-11"
    if not POLICIES[options.weight_policy].has_pipelines:
        if len(pipelines) > 1:
            raise UsageError(
                "`stages` has several pipelines, apart by slashes, which only `policy='wsp'` trains; pass that, or the "
                "stages of one"
            )
        return
    if len(pipelines) == 1:
        raise UsageError(
            f"`policy='wsp'` trains several pipelines; give the stages of each in `stages`, apart by slashes: {several}"
        )
    for at, own in enumerate(pipelines):
        if own.has_teams or max(own.widths) > 1:
            raise UsageError(
                f"`stages`: pipeline {at} has several devices for a stage, and `policy='wsp'` takes one each, such as "
                f"{several}"
            )


def _options_for_stages(fixed_stages: FixedStages, options: PlanOptions, cluster: Cluster) -> PlanOptions:
    groups = _groups(fixed_stages, options)
    needed = sum(group.devices for group in groups)
    if options.gpus is not None and needed > options.gpus:
        raise UsageError(f"`stages` needs {needed} devices, but `gpus` is {options.gpus}")
    if options.use_all and options.gpus is not None and needed < options.gpus:
        raise UsageError(f"`stages` uses {needed} devices, but `use_all` asks for all {options.gpus}")
    if len(fixed_stages.cuts) < options.min_stages:
        raise UsageError(f"`stages` has {len(fixed_stages.cuts)} stages, but `min_stages` is {options.min_stages}")
    if options.gpus is None and (fixed_stages.has_teams or fixed_stages.types):
        # Some may be left over: of other kinds, or of nodes that no team fits any more.
        listed = devices_of(cluster, max(needed, len(cluster.devices)))
        taken = _devices_taken([each.node for each in listed], [each.type for each in listed], fixed_stages, options)
        needed = 1 + max(taken)
    return replace(options, gpus=options.gpus or needed)


def _as_asked(schedule: str, candidate: Candidate) -> bool:
    """Whether a candidate is of a schedule; with all in flight, `1f1b` and `gpipe` are one."""
    if schedule == "auto":
        return True
    whole = plain(schedule) and plain(candidate.schedule)
    return schedule == candidate.schedule or (whole and (schedule == "1f1b" or candidate.all_in_flight))


def _recomputes(costs: CostModel, candidate: Candidate) -> str:
    """Return whether no layer is recomputed, or all that may be; or ``auto``."""
    again = sum(len(stage.recompute) for stage in candidate.stages)
    if not again:
        return "none"
    form = costs.form_of(candidate.stages[0])
    most = len(costs.recompute_levels(candidate.micro_batch_size, form)[-1])
    return "full" if again == most else "auto"
