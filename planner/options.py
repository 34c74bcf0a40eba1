"""PlanOptions: what the user asks of a plan, and which of it contradicts the profile, the objective or the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from autopar.errors import UsageError
from autopar.formats.document import MOST_RANKS, parse_bandwidth, parse_bytes
from autopar.formats.plan import SHARDS, ReplicatedState, Shard, WeightPolicy, layout_of
from autopar.formats.profile import Profile
from autopar.policies import Ahead
from autopar.schedules import SCHEDULES, schedule_named

PLANNED = ("gpipe", "1f1b")
"""Schedules whose plans are bounded by tables; those of others are found by trying."""

CANDIDATES = 500
CANDIDATES_WHEN_EXACT = 100_000

Objective = Literal["step", "throughput", "cost"]
"""What is planned for. Files may have others, of planners that `benchmarks/reproductions/` holds."""


@dataclass(frozen=True)
class PlanOptions:
    """What the user asks of a plan.

    Raises:
        UsageError: a value is out of range, or two contradict each other.
    """

    gpus: int | None = None
    """At most this many devices; None: as many as ``stages`` needs, or as the cluster lists."""
    batch: int | None = None
    """Samples per step; None: the profile's."""
    memory_bytes: int | None = None
    """Limit per device, in place of the cluster's."""
    bytes_per_s: float | None = None
    """Bandwidth of every link, in place of the cluster's numbers and curves."""
    times_of: str | None = None
    """Kind of the profile's devices whose times stand for those of kinds in the cluster that it has none of."""
    policy: WeightPolicy = "sync"
    """Which weights forwards and backwards see; all but ``sync`` plan a pipeline that is never flushed."""
    anneal_steps: int | None = None
    """Mini-batches after which ``pipemare`` reduces rates no longer; it needs them."""
    synchronous_steps: int = 0
    """Mini-batches that ``pipemare`` trains with a flush each, before all others."""
    ahead: Ahead | None = None
    """How many updates ahead ``predict`` predicts: ``counted`` ones, or ``xpipe``'s; None: counted ones."""
    schedule: str = "auto"
    """A name of :data:`autopar.schedules.SCHEDULES`, or torch's for it; autopar's from then on."""
    chunks: int | None = None
    """Stages that every device runs in turn, of ``interleaved``; none: what is quickest of a few."""
    micro_batches: int | None = None
    objective: Objective = "step"
    deadline_s: float | None = None
    """Of a step, which the cheapest plan is to meet; None: however long it takes."""
    gap: float = 0.02
    """Stop when the best plan is proved to be within this share of the best possible; 0 is exact."""
    stages: str | None = None
    """Stages that the user dictates, such as ``0-5:2,6-11:1``; ``0-5:2x4``: four devices run each replica."""
    sequence_parallel: bool = False
    """Whether devices that run a replica keep slices of the sequence where nothing else is split."""
    across_nodes: bool = False
    """Let the devices that run a replica be on several nodes."""
    min_stages: int = 1
    max_stages: int | None = None
    forbid_cut: tuple[str, ...] = ()
    """Layers, by name or index, that no stage may end with."""
    pin: tuple[str, ...] = ()
    """What must share a stage or not, or run where: ``a,b same stage``, ``a,b different stages``, ``a on TYPE``."""
    use_all: bool = False
    divisible: bool = False
    """Price as planners in papers do: a micro-batch divides freely among replicas, the tensors of a boundary cross one
    link, and gradients are reduced after the last backward."""
    recompute: Literal["auto", "none", "full"] = "auto"
    """``auto``: layers are recomputed where that lets a faster plan fit; ``none``, ``full``: no layer, all layers."""
    shard: Literal["auto"] | Shard = "auto"
    """What replicas divide among them; ``auto``: whatever is fastest."""
    replicate_state: ReplicatedState | None = None
    """Lets layers have replicas whose forwards write buffers, and how these are made alike after every step."""
    solver: Literal["dp", "milp"] = "dp"
    solver_seconds: float = 60.0
    """What the solver of ``milp`` may take by its own clock, in all; ``dp`` takes over then."""
    max_candidates: int | None = None
    """Most plans to simulate. A count and not a clock, so that the same question always has the same answer; the gap
    that remains is in the plan."""
    effort: int = 1
    """How much is searched, a count of work and not a clock; more goes on improving."""
    exact: bool = False
    """Whether the fastest plan is wanted, however complicated; else the simplest of those about as fast."""
    equal_widths: bool = False
    """Whether all stages are to have as many replicas, run and sharded alike, as other trainers can express."""
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_search()
        object.__setattr__(self, "schedule", schedule_named(self.schedule))
        self._check_schedule()
        self._check_names()
        self._check_stages()

    def _check_numbers(self) -> None:
        counts = ("gpus", "batch", "micro_batches", "min_stages", "max_stages", "max_candidates", "effort")
        for name in (*counts, "anneal_steps", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"`{name}` must be at least 1, found {value}")
        if self.synchronous_steps < 0:
            raise UsageError(f"`synchronous_steps` must be 0 or more, found {self.synchronous_steps}")
        if self.gpus is not None and self.gpus > MOST_RANKS:
            raise UsageError(f"`gpus` must be at most {MOST_RANKS}, found {self.gpus}")
        if self.bytes_per_s is not None and not 0 < self.bytes_per_s < float("inf"):
            raise UsageError(f"`bytes_per_s` must be positive, found {self.bytes_per_s}")
        if self.deadline_s is not None and not 0 < self.deadline_s < float("inf"):
            raise UsageError(f"`deadline_s` must be positive seconds, found {self.deadline_s}")
        if not 0 <= self.gap < float("inf"):
            raise UsageError(f"`gap` must be 0 or more, found {self.gap}")

    def _check_search(self) -> None:
        other = "`gap=0`" if self.gap == 0 else f"`solver={self.solver!r}`"
        if self.equal_widths and (self.stages is not None or self.solver != "dp" or self.gap == 0):
            other = "`stages`" if self.stages is not None else other
            raise UsageError(f"`equal_widths` does not go with {other}; leave out one of them")
        if self.effort > 1 and (self.gap == 0 or self.solver != "dp"):
            raise UsageError(f"`effort` does not go with {other}, which goes on until it is done; leave out `effort`")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"`seed` must lie in 0..2**63 - 1, found {self.seed}")

    def _check_schedule(self) -> None:
        loop = layout_of(self.schedule) == "loop"
        if self.chunks is not None and (self.chunks < 2 or not loop):
            wanted = "at least 2" if loop else "left out but with `schedule='interleaved'`"
            raise UsageError(f"`chunks` must be {wanted}, found {self.chunks}")
        if self.schedule in SCHEDULES and self.schedule not in PLANNED and self.solver != "dp":
            raise UsageError(f"`solver={self.solver!r}` knows {' and '.join(PLANNED)} only, not {self.schedule}")

    def _check_names(self) -> None:
        self._check_choice("objective", get_args(Objective))
        self._check_choice("policy", get_args(WeightPolicy))
        if self.policy == "pipemare" and self.anneal_steps is None:
            raise UsageError(
                "`policy='pipemare'` reduces rates at first; say for how many mini-batches: `anneal_steps`"
            )
        if self.policy != "pipemare" and (self.anneal_steps is not None or self.synchronous_steps):
            name = "synchronous_steps" if self.anneal_steps is None else "anneal_steps"
            raise UsageError(f"`{name}` is of `policy='pipemare'`; leave it out")
        self._check_ahead()
        if self.solver not in ("dp", "milp"):
            raise UsageError(f"`solver` must be dp or milp, found {self.solver!r}")
        if not 0 < self.solver_seconds < float("inf"):
            raise UsageError(f"`solver_seconds` must be positive, found {self.solver_seconds}")
        if self.recompute not in ("auto", "none", "full"):
            raise UsageError(f"`recompute` must be auto, none or full, found {self.recompute!r}")
        self._check_choice("shard", ("auto", *SHARDS))
        if self.replicate_state not in (None, *get_args(ReplicatedState)):
            raise UsageError(f"`replicate_state` must be first or average, found {self.replicate_state!r}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise UsageError(f"`{name}` must be one of {', '.join(choices)}; found {getattr(self, name)!r}")

    def _check_ahead(self) -> None:
        if self.ahead is not None:
            self._check_choice("ahead", get_args(Ahead))
        if self.ahead is not None and self.policy != "predict":
            raise UsageError("`ahead` is of `policy='predict'`; leave it out")

    def _check_stages(self) -> None:
        if self.max_stages is not None and self.min_stages > self.max_stages:
            raise UsageError(f"`min_stages={self.min_stages}` contradicts `max_stages={self.max_stages}`")
        if self.gpus is not None and self.min_stages > self.gpus and layout_of(self.schedule) == "line":
            raise UsageError(f"`min_stages={self.min_stages}` needs as many devices, but `gpus` is {self.gpus}")

    @classmethod
    def of(cls, function: str, options: PlanOptions | None, values: Mapping[str, Any]) -> PlanOptions:
        """Return options with other values, by name; bytes and bandwidths may be text, such as ``40GiB``.

        Raises:
            UsageError: ``function`` has no such option; or as of the options.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise UsageError(f"{function}() has no option {name!r}; its options are {', '.join(known)}")
        parsed = dict(values)
        for name, parse in (("memory_bytes", parse_bytes), ("bytes_per_s", parse_bandwidth)):
            if isinstance(values.get(name), str):
                parsed[name] = parse(values[name], f"`{name}`")
        return cls(**parsed) if options is None else replace(options, **parsed)

    def unusual(self, names: Iterable[str]) -> list[str]:
        """Return those of some options that are other than by default."""
        return [name for name in names if getattr(self, name) != getattr(PlanOptions, name)]

    @property
    def weight_policy(self) -> WeightPolicy:
        """The weight policy of the plan: stashing, where the quickest pipeline is asked for, and no other is named."""
        return "stash" if self.policy == "sync" and self.objective == "throughput" else self.policy

    @property
    def simple(self) -> bool:
        """Whether the simplest of the plans that are about as fast is wanted."""
        return not self.exact and self.gap > 0

    @property
    def shards(self) -> tuple[Shard, ...]:
        """What replicas may shard."""
        return SHARDS if self.shard == "auto" else (self.shard,)

    @property
    def candidate_limit(self) -> int:
        """Most plans to simulate, the default resolved: a fraction of a second, or nearly any number when exact."""
        if self.max_candidates is not None:
            return self.max_candidates
        return CANDIDATES if self.gap > 0 else CANDIDATES_WHEN_EXACT


def sharding_refusal(profile: Profile) -> tuple[str, str] | None:
    """Return why nothing of a profile can be sharded, and what to profile with instead; None where sharding may be.

    It cannot where layers were compiled, or where the optimizer steps no parts.
    """
    if profile.compiled:
        return "the profile is of compiled layers, which are not sharded", "layers that are not compiled"
    if profile.indivisible is None:
        return None
    reason = f"the optimizer of {profile.model.source} cannot step parts of parameters: {profile.indivisible}"
    return reason, "another optimizer"


def admissible_options(options: PlanOptions, profile: Profile) -> PlanOptions:
    """Return the options without what cannot run, which is sharding of some profiles.

    Raises:
        UsageError: such sharding is asked for.
    """
    refusal = None if options.shard == "none" else sharding_refusal(profile)
    if refusal is None:
        return options
    if options.shard != "auto":
        reason, remedy = refusal
        raise UsageError(f"`shard={options.shard!r}`: {reason}; plan with `shard='none'`, or profile with {remedy}")
    return replace(options, shard="none")


_SEARCH = ("effort", "exact", "equal_widths", "solver", "solver_seconds")
_FOREIGN: dict[Objective, tuple[str, ...]] = {
    "step": ("deadline_s",),
    "cost": ("stages", *_SEARCH),
    "throughput": ("chunks", "divisible", "exact", "equal_widths", "solver", "solver_seconds", "deadline_s"),
}
"""Options that an objective does not know."""
_WHY: dict[Objective, str] = {
    "step": "finds the fastest plan, and not the cheapest one that meets it (`objective='cost'`)",
    "cost": "searches every set of devices",
    "throughput": "is of pipelines that are never flushed",
}


def check_flags(options: PlanOptions) -> None:
    """Refuse an option that the objective does not know.

    Devices, bandwidth, gap and seed apply to all.

    Raises:
        UsageError: names the option.
    """
    for name in options.unusual(_FOREIGN[options.objective]):
        raise UsageError(
            f"`{name}` does not go with `objective={options.objective!r}`, which {_WHY[options.objective]}; "
            f"leave out `{name}`"
        )
    if options.objective == "cost" and options.schedule not in ("auto", *PLANNED):
        raise UsageError(f"`objective='cost'` searches {' and '.join(PLANNED)} only, not {options.schedule}")


_FLUSHED = ("schedule", "chunks", "solver", "exact", "equal_widths", "deadline_s", "divisible", "max_candidates")
"""Options that pipelines without flushes do not know."""


def check_policy(options: PlanOptions) -> PlanOptions:
    """Return the options with what a weight policy decides.

    Raises:
        UsageError: they ask for what no pipeline without flushes has.
    """
    asked = f"`policy={options.policy!r}`" if options.policy != "sync" else f"`objective={options.objective!r}`"
    for name in options.unusual(_FLUSHED):
        if (name, options.schedule) != ("schedule", "1f1b"):
            raise UsageError(f"`{name}` does not go with {asked}; leave out one of them")
    if options.objective == "cost":
        raise UsageError(f"{asked} does not go with `objective='cost'`; leave out one of them")
    if options.shard not in ("auto", "none"):
        raise UsageError(f"`shard={options.shard!r}`: no versions are kept of what replicas divide; leave out `shard`")
    return replace(options, shard="none", schedule="1f1b")
