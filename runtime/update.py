"""Update: a rank's gradients, complete, become a step of its optimizer.

In come gradients; they are scaled, clipped by the norm of all ranks' together or of each stage's, and applied. The
user's optimizer is checked first: that ranks, each with its own, step as one for all parameters would.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from autopar.capture.graph import LayerGraph
from autopar.capture.model.optimizer import Settings, group_settings, needs_all, refuse_others, settings_of
from autopar.capture.model.source import ONE_STAGE, StageTraits, UserModel, stage_traits
from autopar.errors import AutoparError, ModelError, TrainingError, UsageError, cause_of
from autopar.formats.plan import Plan
from autopar.ranks.failure import NonFiniteError, PeerFailedError
from autopar.runtime.device import value_of
from autopar.runtime.gradients import Reducer
from autopar.runtime.loss import LossScale, StepRecord, all_finite, first_not_finite
from autopar.runtime.messages.transport import Pending, Transport
from autopar.runtime.stage.layers import seed_optimizer
from autopar.runtime.stage.parameters import OptimizerParameters, first_stages, local


def whole_settings(user: UserModel, module: nn.Module, graph: LayerGraph, plan: Plan) -> Settings | None:
    """Return what the user's optimizer gives every parameter when it is given all of the model's.

    It is told of a parameter's stage what it is told on the ranks. None of a model without values, where the optimizer
    does not take parameters without.

    Raises:
        UsageError: stages that share a parameter are told different things.
        ModelError: ``optimizer()`` raises.
    """
    trained, stage_of = _trainable_parameters(module), first_stages(plan, graph)
    every_stage = stage_traits(plan, user.optimizer_options)
    try:
        every = {traits: settings_of(user, trained, traits) for traits in dict.fromkeys(every_stage)}
        of_name = {name: every[every_stage[stage_of.get(name, 0)]] for name, _ in trained}
        found = {name: settings[name] for name, settings in of_name.items() if name in settings}
        first = {id(each): name for name, each in trained}
        # Under any of its names, a tied parameter is found.
        names = [(name, first.get(id(each))) for name, each in module.named_parameters(remove_duplicate=False)]
        return {name: found[known] for name, known in names if known in found}
    except ModelError:
        if any(each.is_meta for _, each in trained):
            return None
        raise


def _trainable_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in module.named_parameters() if each.requires_grad]


def check_together(user: UserModel, module: nn.Module, graph: LayerGraph, plan: Plan) -> None:
    """Refuse an optimizer that needs all parameters at once where no rank has all of them.

    Raises:
        UsageError: says what to do.
    """
    holding = 0
    for chunks in plan.groups:
        layers = [graph.layer(name) for stage in chunks for name in plan.stages[stage].layers]
        holding += any(each.requires_grad for layer in layers for _, each in layer.named_parameters())
    parts = any(stage.tensor_parallel > 1 for stage in plan.stages)
    why = needs_all(user, _trainable_parameters(module)) if holding > 1 or parts else None
    if why is not None:
        groups = f"them on the ranks of {holding} groups of devices"
        where = "parts of them on devices that run a replica together" if parts else groups
        single = ", and `stages` of one device for each replica" if parts else ""
        raise UsageError(
            f"{user.path}: the optimizer's step {why}, and the plan puts {where}; plan with `max_stages=1`{single} (or "
            "use `clip_norm` in place of a norm of the optimizer's own)"
        )


def left_out(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    user: UserModel,
    whole: Collection[str] | None,
) -> list[str]:
    """Return the names of the parameters that an optimizer was given and does not step.

    Args:
        optimizer: a rank's.
        parameters: what it was made for.
        user: whose it is.
        whole: the names of those that one for the whole model steps, if that is known.

    Raises:
        ModelError: it steps something that it was not given.
    """
    refuse_others(optimizer, parameters.values(), user)
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = {names[id(each)] for group in optimizer.param_groups for each in group["params"]}
    return [name for name in parameters if name not in found and (whole is None or name not in whole)]


def check_settings(
    user: UserModel,
    parameters: Mapping[str, nn.Parameter],
    whole: Settings,
    rank: int,
    traits: StageTraits = ONE_STAGE,
) -> None:
    """Hold what a rank's optimizer gives its parameters against what one for all of the model's parameters does.

    Args:
        user: whose it is.
        parameters: the rank's.
        whole: what it gives every parameter of the model.
        rank: which rank this is.
        traits: what it is told of the rank's stages.

    Raises:
        ModelError: a parameter gets something else; names it and the setting.
    """
    own = settings_of(user, list(parameters.items()), traits)
    for name in parameters:
        said = _difference(name, f"when it is given the parameters of rank {rank}", own.get(name), whole.get(name))
        if said is not None:
            raise ModelError(
                f"{user.path}: optimizer() {said}; let it go by names, which are the same on all ranks: call its "
                "argument named_parameters to be given pairs (name, parameter)"
            )


def _difference(
    name: str, here: str, own: list[dict[str, object]] | None, whole: list[dict[str, object]] | None
) -> str | None:
    if own is None or whole is None:
        does, other_does = ("steps", "does not") if whole is None else ("does not step", "does")
        return None if own is whole else f"{does} {name} {here}, and {other_does} when it is given all"
    for step, (mine, other) in enumerate(zip(own, whole, strict=False)):
        for key in {**other, **mine}:
            if mine.get(key) != other.get(key):
                when, (value, of_all) = (
                    f" in step {step}" if step else "",
                    (str(each.get(key))[:60] for each in (mine, other)),
                )
                return (
                    f"gives {name} {key}={value}{when} {here}, and {key}={of_all} when it is given all of the model's"
                )
    return None


TINY = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm."""


@dataclass(frozen=True)
class UpdateSettings:
    """What an update is of, and what is asked of it."""

    plan: Plan
    """What is carried out."""
    rank: int
    """Which rank this is."""
    user: UserModel
    """Makes the optimizer."""
    stage_of: Mapping[str, int]
    """The first stage that reads each of the rank's parameters."""
    whole: Settings | None
    """What the optimizer gives every parameter of the whole model, if that is known."""
    counts: bool
    """Whether losses are a sum and a count, and gradients are to be divided by the latter."""
    clip_norm: float | None
    """Largest norm of gradients."""
    clips_stages: bool
    """Whether that is of each stage's gradients, and not of all together."""
    scale: LossScale | None
    """What losses were multiplied by."""

    @property
    def traits(self) -> StageTraits:
        """What the optimizer is told of the rank's stages."""
        traits = stage_traits(self.plan, self.user.optimizer_options)
        return traits[self.plan.ownership.ranks[self.rank].stage]

    @property
    def parts(self) -> Sequence[int | None]:
        """What gradients have a norm of: every stage, or the whole model."""
        return range(len(self.plan.stages)) if self.clips_stages else (None,)

    @property
    def own_parts(self) -> Sequence[int | None]:
        """Those that the rank has some of."""
        return self.plan.ownership.ranks[self.rank].stages if self.clips_stages else (None,)


class Update:
    """Scales, clips and applies the gradients of a rank; what concerns all ranks they decide alike."""

    def __init__(
        self,
        settings: UpdateSettings,
        twins: OptimizerParameters,
        reducer: Reducer,
        transport: Transport,
        before: Callable[[], None] = lambda: None,
        after: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Make the optimizer and its scheduler.

        Args:
            settings: what is updated, and how.
            twins: this rank's trained parameters; an optimizer is made if there are any.
            reducer: the gradients.
            transport: carries sums over all ranks.
            before: what becomes of buffers before every update.
            after: and what is done behind it.

        Raises:
            ModelError: the optimizer wants to run forwards itself, or does something else with these parameters than
                with all of the model's.
        """
        self._settings, user, self._before, self._after = settings, settings.user, before, after
        self._reducer, self._transport, self._everyone = reducer, transport, tuple(range(len(settings.plan.devices)))
        self._trainable_parameters = twins.trainable_parameters
        self.optimizer_parameters = twins.optimizer_parameters
        """What the optimizer is given, by the model's own names."""
        given = twins.optimizer_parameters.items()
        self.optimizer = user.make_optimizer(given, settings.traits) if self._trainable_parameters else None
        groups = () if self.optimizer is None else self.optimizer.param_groups
        self.fresh_groups = [deepcopy(group_settings(group)) for group in groups]
        """The settings of the optimizer's groups, before any scheduler."""
        self.scheduler = None if self.optimizer is None else user.make_scheduler(self.optimizer)
        self.scale = settings.scale
        """What losses are multiplied by; None where they are not."""
        self.notes: list[str] = []
        """What whoever reads the report should know."""
        if self.optimizer is not None:
            _check_steps(self.optimizer, user)
            self._check_parameters(self.optimizer, twins.optimizer_parameters)
        policy = settings.plan.policy
        sees_loss = policy.refusal_of("watched_loss") is None
        self._watches: bool | None = None if user.schedules and sees_loss else False
        """Whether a scheduler of some rank watches the loss; what all ranks find out in the first step."""
        self._apart, self._sums_gradients = policy.sums_apart, policy.sums_gradients
        """Whether sums over all ranks run beside others, and whether they have gradients in them."""
        self._begun_sums: dict[int, _BegunSum] = {}
        """By mini-batch."""

    def _check_parameters(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        user, whole = self._settings.user, self._settings.whole
        left = left_out(optimizer, parameters, user, whole)
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            self.notes.append(f"the optimizer leaves out {left[0]}{more}: they stay as they are")
        if whole is not None:
            check_settings(user, parameters, whole, self._settings.rank, self._settings.traits)

    def begin(self, record: StepRecord) -> None:
        """Begin the sum over all ranks that the update of a mini-batch waits for."""
        self._begun_sums[record.step] = self._begin_sum([record.loss, record.count, *self._own_squares(record.step)])

    def __call__(self, record: StepRecord, mini_batches: int = 1) -> None:
        """Step the optimizer; note the gradients' norm, and whether they overflowed.

        Args:
            record: of the mini-batch, or the first of several.
            mini_batches: of how many gradients are the sum; their mean is applied, and schedulers go on by as many.

        Raises:
            TrainingError: a gradient is not finite, and its loss was not scaled; or nothing was counted in the whole
                mini-batch.
        """
        self._before()
        self._step(record, mini_batches)
        for act in self._after:
            act()

    def _step(self, record: StepRecord, mini_batches: int) -> None:
        self._reducer.sum_in_team(record.step)
        if mini_batches > 1:
            self._reducer.scale(1.0 / mini_batches)
        factors, applies = self._agree(record)
        for part, factor in factors.items():
            if factor != 1.0:
                self._reducer.scale(factor, part)
        self._reducer.release_untouched()
        if self.optimizer is not None:
            groups = self.optimizer.param_groups
            record.learning_rates = tuple(float(group["lr"]) for group in groups if "lr" in group)
        if self.optimizer is not None and applies:
            with _stepping("optimizer"):
                self._apply(self.optimizer, record.step)
        with _stepping("scheduler"):
            for _ in range(mini_batches):
                self._step_scheduler(record)

    def _apply(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        device = next((each.device for each in self._trainable_parameters.values()), torch.device("cpu"))
        plan = self._settings.plan
        seed_optimizer(device, plan.seed, plan.number_of(step, plan.ownership.ranks[self._settings.rank].stage))
        optimizer.step()

    def _agree(self, record: StepRecord) -> tuple[dict[int | None, float], bool]:
        """Return what gradients are to be multiplied by, part by part, and whether they are to be applied."""
        loss, count, *squares = self._totals(record)
        finite = math.isfinite(sum(squares))
        if self.scale is None and not finite:
            raise self._not_finite()
        factor = self._common_factor(record, loss, count, finite=finite) if self.adds_up else 1.0
        if record.overflow or not self._wants_norm:
            return dict.fromkeys(self._settings.own_parts, factor), not record.overflow
        norms = {part: math.sqrt(found) * factor for part, found in zip(self._settings.parts, squares, strict=True)}
        record.gradient_norm = norms.get(None)
        most = math.inf if self._settings.clip_norm is None else self._settings.clip_norm
        return {part: factor * min(1.0, most / (norms[part] + TINY)) for part in self._settings.own_parts}, True

    def _common_factor(self, record: StepRecord, loss: float, count: float, *, finite: bool) -> float:
        """Return what all gradients are to be multiplied by, clipped or not; note the loss, and an overflow."""
        counts = self._settings.counts
        if counts and not count:
            raise TrainingError("loss() returned a count of 0 for the whole mini-batch; nothing was updated")
        divisor = count if counts else 1.0
        record.total_loss = loss / divisor
        if self.scale is None:
            return 1.0 / divisor
        record.overflow = not finite
        self.scale.update(record.overflow)
        return 1.0 / divisor / record.scale

    def _totals(self, record: StepRecord) -> Sequence[float]:
        """Return loss, count and squares, part by part; where no norm is wanted, these only say if all is finite."""
        if self._watches is None:
            # A rank without parameters has no scheduler, and takes part all the same.
            self._watches = bool(self._begin_sum([float(isinstance(self.scheduler, ReduceLROnPlateau))]).wait()[0])
        if not self.adds_up:
            return 0.0, 0.0, *self._squares_or_finite()
        if record.step not in self._begun_sums:
            self.begin(record)
        loss, count, *squares = self._begun_sums.pop(record.step).wait()
        return loss, count, *(squares if self._sums_gradients else self._squares_or_finite())

    @property
    def _wants_norm(self) -> bool:
        """Whether norms are wanted."""
        return self._settings.clip_norm is not None or self.scale is not None

    @property
    def adds_up(self) -> bool:
        """Whether an update takes what only all ranks know together."""
        wants_sum = self._wants_norm and self._sums_gradients
        return self._settings.counts or wants_sum or bool(self._watches)

    def _own_squares(self, step: int) -> list[float]:
        """Return this rank's part of the sums of squares, or what tells whether gradients are finite."""
        if not self._sums_gradients:
            # There may be none yet.
            return [0.0] * len(self._settings.parts)
        self._reducer.sum_in_team(step)
        with self._reducer.gradients_of(step):
            return self._squares_or_finite()

    def _squares_or_finite(self) -> list[float]:
        """Return squares where norms are wanted; else 0, or what no sum makes finite if a gradient is not.

        Ranks that add up anyway then all see it.
        """
        if self._wants_norm:
            return self._squares() if self._sums_gradients else self._sum_in_team(self._squares())
        return [0.0 if all_finite(self._reducer.complete()) else math.nan] * len(self._settings.parts)

    def _not_finite(self) -> TrainingError:
        """Return what to say of gradients that are not finite."""
        stage_of = self._settings.stage_of
        # Of a rank's stages, the last one is where it appeared.
        names = sorted(self._trainable_parameters, key=stage_of.__getitem__, reverse=True)
        there = ((name, self._trainable_parameters[name].grad) for name in names)
        name = first_not_finite((name, local(gradient)) for name, gradient in there if gradient is not None)
        if name is not None:
            single = self._settings.plan.micro_batches == 1
            place = f"stage {stage_of[name]}" + (", micro-batch 0" if single else "")
            said = f"the gradient of {name} ({place}) is not finite; nothing was updated"
            return NonFiniteError(said, stage_of[name], forward=False)
        if len(self._everyone) > 1 and math.isfinite(sum(self._squares())):
            return PeerFailedError("the gradients of another rank are not finite; nothing was updated")
        return TrainingError("the norm of all gradients is too large for a number; nothing was updated")

    def _squares(self) -> list[float]:
        """Return sums of squares, part by part: of what this rank answers for; of all it has, if ranks add up none."""
        return [
            _sum_of_squares(self._gradients_of(part)) if part in self._settings.own_parts else 0.0
            for part in self._settings.parts
        ]

    def _sum_in_team(self, values: list[float]) -> list[float]:
        """Return the sum over the ranks that run this replica together, which hold other parts of its gradients."""
        team = self._settings.plan.ownership.ranks[self._settings.rank].team
        if len(team) == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        return _BegunSum(total, self._transport.all_reduce(total, team)).wait()

    def _gradients_of(self, part: int | None) -> list[torch.Tensor]:
        if part is None:
            return self._reducer.owned_gradients()
        reducer = self._reducer
        return reducer.owned_gradients_of(part) if self._sums_gradients else reducer.gradients_of_stage(part)

    def _begin_sum(self, values: list[float]) -> _BegunSum:
        # In the hosts' memory, where they are known and wanted: GPUs go on meanwhile.
        total = torch.tensor(values, dtype=torch.float64)
        return _BegunSum(total, self._transport.all_reduce(total, self._everyone, apart=self._apart))

    def _step_scheduler(self, record: StepRecord) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(record.total_loss or 0.0)
        elif isinstance(self.scheduler, LRScheduler):
            self.scheduler.step()


def _sum_of_squares(gradients: Sequence[torch.Tensor]) -> float:
    real = (torch.view_as_real(each) if each.is_complex() else each for each in gradients)
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in real]
    return value_of(torch.stack(norms).square().sum()) if norms else 0.0


class _BegunSum(NamedTuple):
    """A sum over all ranks that is under way."""

    total: torch.Tensor
    pending: Pending

    def wait(self) -> list[float]:
        """Return it, once it is there."""
        self.pending.wait()
        return [float(each) for each in self.total.tolist()]


@contextmanager
def _stepping(what: str) -> Iterator[None]:
    """Say of an error of the user's optimizer or scheduler whose it is."""
    try:
        yield
    except (AutoparError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise TrainingError(f"the {what}'s step raised {cause_of(error)}") from error


def _check_steps(optimizer: torch.optim.Optimizer, model: UserModel) -> None:
    """Refuse an optimizer whose step calls for the loss again and again, as L-BFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise ModelError(
            f"{model.path}: optimizer() returned a {name}, whose step runs the model itself; use one whose step needs "
            "no closure"
        )
