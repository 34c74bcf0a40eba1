"""PlanOptions: what the user asks of a plan, and which of it contradicts the profile, the objective or the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from autopar.depths import Ahead
from autopar.errors import UsageError
from autopar.formats.document import MOST_RANKS
from autopar.formats.plan import ReplicatedState, UsedWeights, WeightPolicy
from autopar.formats.profile import Profile
from autopar.formats.stage import layout_of
from autopar.options.option import Options, option
from autopar.ownership import SHARDS, Division, Shard
from autopar.policies import POLICIES, names_text

PLANNED = ("gpipe", "1f1b")
"""Schedules whose plans are bounded by tables; those of others are found by trying."""

CANDIDATES = 500
_CANDIDATES_WHEN_EXACT = 100_000

Objective = Literal["step", "throughput", "cost"]
"""What is planned for. Files may have others, of planners that `benchmarks/reproductions/` holds."""
Recomputation = Literal["auto", "none", "full"]
Slices = Literal["auto", "on", "off"]
_POLICY_OF: dict[tuple[str, str], WeightPolicy] = {("throughput", "sync"): "stash"}
"""By objective and policy, what the quickest pipeline is asked of in its place."""


_PIPELINE, _LIMITS, _POLICY = "Stages and replicas", "Constraints", "Pipelines without flushes"
_AVERAGE = "An average of weights"
_SEARCH_FOR, _ASSUME, _LENGTH = "Search", "Assumptions", "Length of training"
MOST_TENSOR = 8
"""Devices of a team that a profile has costs for."""
MOST_WAVE = 64
"""Mini-batches of a wave, and waves that a pipeline may be ahead: programs are as long, and memory is as much."""
MOST_SAMPLES = 10**18
"""Of a training, and tokens: more is a slip."""


@dataclass(frozen=True)
class PlanOptions(Options):
    """What the user asks of a plan.

    Raises:
        UsageError: a value is out of range, or two contradict each other.
    """

    gpus: int | None = option(
        None,
        "At most this many devices; default: as many as `stages` needs, or all of the cluster.",
        least=1,
        most=MOST_RANKS,
    )
    batch: int | None = option(None, "Samples per step; default: the profile's.", least=1)
    memory_bytes: int | None = option(
        None, "Limit per device, such as 16GiB, in place of the cluster's.", unit="bytes", least=1
    )
    schedule: str = option(
        "auto",
        "auto, gpipe, 1f1b; interleaved, zb-v or dualpipe-v (several stages on every device); zb-h1 or zb-h2. The zb "
        "ones and dualpipe-v have backwards in two halves. torch's names do, too, such as Interleaved1F1B.",
    )
    micro_batches: int | None = option(None, "Micro-batches per step; default: the best.", least=1)
    objective: Objective = option(
        "step",
        "step: least seconds per step; cost: cheapest training (the cluster prices its devices); throughput: quickest "
        "asynchronous pipeline.",
    )
    recompute: Recomputation = option(
        "auto", "Layers that run forward again to save memory: auto (as far as a faster plan needs), none or full."
    )
    shard: Literal["auto"] | Shard = option(
        "auto", "What replicas divide: none, optimizer (its state), gradients, parameters, or auto (the fastest)."
    )
    stages: str | None = option(
        None,
        "Plan these stages: layers:replicas, such as 0-5:2,6-11:1, or by layer names; 0-5:2x4: four devices run each "
        "replica together; 0-5:2@H100+1@V100: on kinds of devices; with several stages on a device, replicas repeat. "
        "0-5,6-11/0-2,3-11: two pipelines, of `policy='wsp'`.",
    )

    tensor: Literal["auto"] | int = option(
        "auto",
        "Devices that run every replica together, each with a part of its layers (tensor parallelism): 1, 2, 4 or 8, "
        "or auto: what is fastest, stage by stage.",
        least=1,
        most=MOST_TENSOR,
    )

    division: Division = option(
        "split",
        "How replicas of `stages` share the work: split (each takes rows of every micro-batch) or round-robin (whole "
        "micro-batches in turn).",
        _PIPELINE,
    )
    chunks: int | None = option(
        None, "Stages on every device, of `schedule='interleaved'`; default: the best of 2 to 4.", _PIPELINE
    )
    sequence_parallel: Slices | bool = option(
        "auto",
        "Whether devices that run a replica together keep slices of the sequence where nothing else is split: on, off, "
        "or auto (where it is faster or saves memory that is needed; of `stages`, off). Without a value: on.",
        _PIPELINE,
        bare="on",
    )
    across_nodes: bool = option(False, "Let the devices that run a replica together be on several nodes.", _PIPELINE)
    replicate_state: ReplicatedState | None = option(
        None,
        "Let layers have replicas whose forwards write buffers (spectral norm, moving averages), and make the buffers "
        "alike after every step: those of the first replica (first), or their mean (average).",
        _PIPELINE,
    )

    min_stages: int = option(1, "At least this many pipeline stages.", _LIMITS, least=1)
    max_stages: int | None = option(None, "At most this many pipeline stages.", _LIMITS, least=1)
    forbid_cut: tuple[str, ...] = option(
        (), "No stage ends with this layer, by name or index; may be repeated.", _LIMITS
    )
    pin: tuple[str, ...] = option(
        (),
        "'a,b same stage', 'a,b different stages', or 'a,b on TYPE' (of devices); layers by name or index; may be "
        "repeated.",
        _LIMITS,
    )
    use_all: bool = option(False, "Leave no device idle.", _LIMITS)
    equal_widths: bool = option(
        False, "As many replicas of every stage, run alike: what most other trainers can express.", _LIMITS
    )
    deadline_s: float | None = option(
        None,
        "Seconds that a step may take, of `objective='cost'`: the cheapest plan of those that do.",
        _LIMITS,
        unit="seconds",
        above=0,
    )

    policy: WeightPolicy = option(
        "sync",
        "Weights that forwards and backwards see: sync: those of the step, with a flush at its end; without flushes: "
        f"{names_text(pipelines=False)}; of several pipelines that train together: {names_text(pipelines=True)}.",
        _POLICY,
    )
    wave: int | None = option(
        None,
        "Mini-batches behind whose last a pipeline of `policy='wsp'` pushes what they have changed, and at most as "
        "many are in flight; default: as many as the longest pipeline has stages.",
        _POLICY,
        least=1,
        most=MOST_WAVE,
    )
    staleness: int | None = option(
        None,
        "By how many waves more than one a pipeline of `policy='wsp'` may be ahead of what it has taken of others; "
        "default: 0.",
        _POLICY,
        least=0,
        most=MOST_WAVE,
    )
    eager: bool = option(
        False,
        "Let pipelines of `policy='wsp'` take all waves of others that have come, and not those alone that `staleness` "
        "says: what is trained depends on time then, and is logged to be replayed.",
        _POLICY,
    )
    anneal_steps: int | None = option(
        None,
        "Mini-batches for which `policy='pipemare'` reduces rates, less and less; it needs them.",
        _POLICY,
        least=1,
    )
    synchronous_steps: int = option(
        0, "Mini-batches that `policy='pipemare'` trains with a flush each, before all others.", _POLICY, least=0
    )
    ahead: Ahead | None = option(
        None,
        "How many updates ahead `policy='predict'` predicts: counted (for forwards, the updates until the mini-batch's "
        "own; the default), or xpipe (XPipe's constants, for backwards, too).",
        _POLICY,
    )

    ema_decay: float | None = option(
        None,
        "Keep an average of the weights, which every step moves by 1 - `ema_decay` of the way to the new ones (an "
        "exponential moving average), such as 0.999. Checkpoints have it.",
        _AVERAGE,
        least=0,
        most=1,
    )
    used_weights: UsedWeights | None = option(
        None,
        "Weights that evaluation, saved weights and exported checkpoints have: trained, or average. Default: average, "
        "where there is one.",
        _AVERAGE,
    )

    gap: float = option(
        0.02,
        "Stop this close to the best possible plan. 0 goes on until one is proved best: of many devices, this can take "
        "hours, and tens of GB.",
        _SEARCH_FOR,
        least=0,
    )
    effort: int = option(
        1,
        "Search so many times as much: a count of work and no clock, so that a question has one answer.",
        _SEARCH_FOR,
        least=1,
    )
    exact: bool = option(
        False, "Take the fastest plan, instead of the simplest of those within 1 % of it.", _SEARCH_FOR
    )
    solver: Literal["dp", "milp"] = option(
        "dp", "dp, or milp: the same question as a mixed-integer program.", _SEARCH_FOR
    )
    solver_seconds: float = option(
        60.0, "What milp's solver may take, by its own clock, in all; then dp takes over.", _SEARCH_FOR, above=0
    )
    max_candidates: int | None = option(
        None,
        "Most plans to simulate: a count and no clock, so that a question has one answer. The gap that remains is in "
        "the plan.",
        _SEARCH_FOR,
        least=1,
        is_typed=False,
    )

    bytes_per_s: float | None = option(
        None,
        "Assume this bandwidth of every link, such as 25GB/s, in place of the cluster's.",
        _ASSUME,
        unit="bytes/s",
        above=0,
        flag="bandwidth",
    )
    times_of: str | None = option(
        None,
        "Let the profile's times of this kind of device, such as H100 or cpu, stand for kinds in the cluster that it "
        "has none of.",
        _ASSUME,
    )
    divisible: bool = option(
        False,
        "Price as papers do: micro-batches divide freely among replicas, a boundary's tensors cross one link, and "
        "gradients are reduced after the last backward. Cannot be run.",
        _ASSUME,
    )
    tokens: float | None = option(
        None,
        "Tokens to train on, such as 15T; the plan then records how many days that takes, device hours and, where they "
        "are known, cost and energy.",
        _LENGTH,
        unit="tokens",
        above=0,
        most=MOST_SAMPLES,
    )
    samples: float | None = option(
        None,
        "The same in samples, such as 90M; of an epoch, those of the dataset.",
        _LENGTH,
        unit="samples",
        above=0,
        most=MOST_SAMPLES,
    )
    tokens_per_sample: int | None = option(
        None, "Tokens of a sample; default: as many as the model's integer inputs have.", _LENGTH, least=1
    )
    seed: int = option(0, "Run seed that the plan records.", "Output", least=0, most=2**63 - 1)

    def __post_init__(self) -> None:
        # Of schedules, whose orders are computed with numpy, the command line's help needs none.
        from autopar.schedules import schedule_named

        if isinstance(self.sequence_parallel, bool):
            object.__setattr__(self, "sequence_parallel", "on" if self.sequence_parallel else "off")
        super().__post_init__()
        if self.tokens is not None and self.samples is not None:
            raise UsageError("`tokens` and `samples` both say how long training is; leave one of them out")
        self._check_search()
        object.__setattr__(self, "schedule", schedule_named(self.schedule))
        self._check_schedule()
        self._check_policy()
        self._check_stages()

    def _check_search(self) -> None:
        other = "`gap=0`" if self.gap == 0 else f"`solver={self.solver!r}`"
        if self.equal_widths and (self.stages is not None or self.solver != "dp" or self.gap == 0):
            other = "`stages`" if self.stages is not None else other
            raise UsageError(f"`equal_widths` does not go with {other}; leave out one of them")
        if self.effort > 1 and (self.gap == 0 or self.solver != "dp"):
            raise UsageError(f"`effort` does not go with {other}, which goes on until it is done; leave out `effort`")

    def _check_schedule(self) -> None:
        loop = layout_of(self.schedule) == "loop"
        if self.chunks is not None and (self.chunks < 2 or not loop):
            wanted = "at least 2" if loop else "left out but with `schedule='interleaved'`"
            raise UsageError(f"`chunks` must be {wanted}, found {self.chunks}")
        if self.schedule not in ("auto", *PLANNED) and self.solver != "dp":
            raise UsageError(f"`solver={self.solver!r}` knows {' and '.join(PLANNED)} only, not {self.schedule}")

    def _check_policy(self) -> None:
        for name, why in POLICIES[self.policy].asks.items():
            if getattr(self, name) is None:
                raise UsageError(why)
        for each in POLICIES.values():
            for name in self.non_defaults(each.settings) if each.name != self.policy else ():
                raise UsageError(f"`{name}` is of `policy={each.name!r}`; leave it out")
        if self.used_weights == "average" and self.ema_decay is None:
            raise UsageError(
                "`used_weights='average'` is of an average that nothing keeps; pass `ema_decay=0.999`, too"
            )

    def _check_stages(self) -> None:
        if self.tensor != "auto" and self.stages is not None and self.tensor > 1:
            raise UsageError(f"`tensor` does not go with `stages`, which say it: 0-5:2x{self.tensor}; leave out one")
        for name in self.asked_of_teams if self.tensor == 1 and self.stages is None else ():
            raise UsageError(f"`{name}` is of several devices a replica, and `tensor` is 1; leave out one of them")
        if self.division != "split":
            if self.stages is None:
                raise UsageError(f"`division={self.division!r}` is of `stages`; pass these, too")
            if self.schedule not in ("auto", *PLANNED):
                raise UsageError(f"`division={self.division!r}`: replicas of {self.schedule} split micro-batches")
        if self.max_stages is not None and self.min_stages > self.max_stages:
            raise UsageError(f"`min_stages={self.min_stages}` contradicts `max_stages={self.max_stages}`")
        if self.gpus is not None and self.min_stages > self.gpus and layout_of(self.schedule) == "line":
            raise UsageError(f"`min_stages={self.min_stages}` needs as many devices, but `gpus` is {self.gpus}")

    @property
    def weight_policy(self) -> WeightPolicy:
        """The weight policy of the plan: stashing, where the quickest pipeline is asked for, and no other is named."""
        return _POLICY_OF.get((self.objective, self.policy), self.policy)

    @property
    def average(self) -> dict[str, Any]:
        """What a plan records of an average of weights."""
        used = self.used_weights or ("trained" if self.ema_decay is None else "average")
        return {"ema_decay": self.ema_decay, "used_weights": used}

    @property
    def says_length(self) -> bool:
        """Whether the plan is to record what a training takes."""
        return any(each is not None for each in (self.tokens, self.samples, self.tokens_per_sample))

    @property
    def simple(self) -> bool:
        """Whether the simplest of the plans that are about as fast is wanted."""
        return not self.exact and self.gap > 0

    @property
    def shards(self) -> tuple[Shard, ...]:
        """What replicas may shard."""
        return SHARDS if self.shard == "auto" else (self.shard,)

    @property
    def asked_of_teams(self) -> dict[str, object]:
        """Options that want several devices to run a replica, with their values."""
        asked = {
            "tensor": self.tensor not in ("auto", 1),
            "sequence_parallel": self.sequence_parallel == "on",
            "across_nodes": self.across_nodes,
        }
        return {name: getattr(self, name) for name, wants in asked.items() if wants}

    @property
    def candidate_limit(self) -> int:
        """Most plans to simulate, the default resolved: a fraction of a second, or nearly any number when exact."""
        if self.max_candidates is not None:
            return self.max_candidates
        return CANDIDATES if self.gap > 0 else _CANDIDATES_WHEN_EXACT


def division_refusal(profile: Profile) -> tuple[str, str] | None:
    """Return why no parameters of a profile can be divided among devices, and what to profile with; None: they can.

    They cannot where layers were compiled, or where the optimizer steps no parts: not sharded, and not run by teams.
    """
    if profile.compiled:
        return f"the profile of {profile.model.source} is of compiled layers, which are not divided", "eager layers"
    if profile.indivisible is None:
        return None
    reason = f"the optimizer of {profile.model.source} cannot step parts of parameters: {profile.indivisible}"
    return reason, "another optimizer"


def admissible_options(options: PlanOptions, profile: Profile) -> PlanOptions:
    """Return the options without what cannot run, which is sharding of some profiles.

    Raises:
        UsageError: such sharding is asked for.
    """
    refusal = None if options.shard == "none" else division_refusal(profile)
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
    for name in options.non_defaults(_FOREIGN[options.objective]):
        raise UsageError(
            f"`{name}` does not go with `objective={options.objective!r}`, which {_WHY[options.objective]}; "
            f"leave out `{name}`"
        )
    if options.objective == "cost" and options.schedule not in ("auto", *PLANNED):
        raise UsageError(f"`objective='cost'` searches {' and '.join(PLANNED)} only, not {options.schedule}")


_FLUSHED = (
    *("schedule", "chunks", "solver", "exact", "equal_widths", "deadline_s", "divisible", "max_candidates"),
    "ema_decay",
)
"""Options that pipelines without flushes do not know."""


def check_policy(options: PlanOptions) -> PlanOptions:
    """Return the options with what a weight policy decides.

    Raises:
        UsageError: they ask for what no pipeline without flushes has.
    """
    policy = POLICIES[options.weight_policy]
    if policy.schedule is None:
        return options
    asked = (
        f"`policy={options.policy!r}`" if options.non_defaults(("policy",)) else f"`objective={options.objective!r}`"
    )
    for name in options.non_defaults(_FLUSHED):
        if (name, options.schedule) != ("schedule", policy.schedule):
            raise UsageError(f"`{name}` does not go with {asked}; leave out one of them")
    for name in options.asked_of_teams if options.stages is None else ():
        more = ", or say in `stages` which devices run a replica together: 0-5:2x4"
        raise UsageError(f"`{name}` does not go with {asked}, which looks at single devices; leave it out{more}")
    if options.objective == "cost":
        raise UsageError(f"{asked} does not go with `objective='cost'`; leave out one of them")
    if options.shard not in ("auto", "none"):
        raise UsageError(f"`shard={options.shard!r}`: no versions are kept of what replicas divide; leave out `shard`")
    return replace(options, shard="none", schedule=policy.schedule)
