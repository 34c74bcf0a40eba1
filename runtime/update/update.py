"""Update: a rank's gradients, complete, become a step of its optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from autopar.capture.optimizer import Settings
from autopar.capture.source import UserModel
from autopar.errors import AutoparError, ModelError, TrainingError
from autopar.formats.plan import Plan
from autopar.ranks.failure import PeerLostError
from autopar.runtime.execute.execute import StepRecord
from autopar.runtime.gradients.reducer import Reducer
from autopar.runtime.gradients.scale import LossScale, all_finite, first_not_finite
from autopar.runtime.messages.transport import Transport
from autopar.runtime.stage.layers import seed_optimizer
from autopar.runtime.stage.parameters import Twins, local
from autopar.runtime.update.stepping import check_settings, left_out

TINY = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm."""


class Update:
    """Scales, clips and applies the gradients of a rank; what concerns all ranks they decide alike."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        twins: Twins,
        stage_of: Mapping[str, int],
        model: UserModel,
        reducer: Reducer,
        transport: Transport,
        *,
        whole: Settings | None,
        counts: bool,
        clip_norm: float | None,
        scale: LossScale | None,
    ) -> None:
        """Make the optimizer and its scheduler.

        Args:
            plan: what is carried out.
            rank: which rank this is.
            twins: this rank's trained parameters; an optimizer is made if there are any.
            stage_of: the first stage that reads each of them.
            model: the user's file, which makes the optimizer.
            reducer: the gradients.
            transport: carries sums over all ranks.
            whole: what the optimizer gives every parameter of the whole model, if that is known.
            counts: whether losses are a sum and a count, and gradients are to be divided by the latter.
            clip_norm: largest norm of all gradients together.
            scale: what losses were multiplied by.

        Raises:
            ModelError: the optimizer wants to run forwards itself, or does something else with these parameters than
                with all of the model's.
        """
        self._rank = rank
        self._device = next((each.device for each in twins.trained.values()), torch.device("cpu"))
        self._plan, self._trained, self._stage_of = plan, twins.trained, stage_of
        self.optimizer = model.make_optimizer(twins.stepped.items()) if self._trained else None
        self._scheduler = None if self.optimizer is None else model.make_scheduler(self.optimizer)
        self.notes: list[str] = []
        """What whoever reads the report should know."""
        if self.optimizer is not None:
            _check_steps(self.optimizer, model)
            self._check_parameters(self.optimizer, twins.stepped, model, whole)
        self._reducer, self._transport, self._everyone = reducer, transport, tuple(range(len(plan.devices)))
        self._counts, self._clip_norm, self._scale = counts, clip_norm, scale
        self._watches: bool | None = None if model.schedules else False
        """Whether a scheduler of some rank watches the loss; what all ranks find out in the first step."""

    def _check_parameters(
        self,
        optimizer: torch.optim.Optimizer,
        given: Mapping[str, torch.nn.Parameter],
        model: UserModel,
        whole: Settings | None,
    ) -> None:
        left = left_out(optimizer, given, model, whole)
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            self.notes.append(f"the optimizer leaves out {left[0]}{more}: they stay as they are")
        if whole is not None:
            check_settings(model, given, whole, self._rank)

    def __call__(self, record: StepRecord) -> None:
        """Step the optimizer; note the gradients' norm, and whether they overflowed.

        Raises:
            TrainingError: a gradient is not finite, and its loss was not scaled; or nothing was counted in the whole
                mini-batch.
        """
        factor, applies = self._agree(record)
        if factor != 1.0:
            self._reducer.scale(factor)
        self._reducer.release_untouched()
        if self.optimizer is not None and applies:
            with _stepping("optimizer"):
                self._apply(self.optimizer, record.step)
        with _stepping("scheduler"):
            self._step_scheduler(record)

    def _apply(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        seed_optimizer(self._device, self._plan.seed, step)
        optimizer.step()

    def _agree(self, record: StepRecord) -> tuple[float, bool]:
        """Return what all gradients are to be multiplied by, and whether they are to be applied."""
        if self._watches is None:
            # A rank without parameters has no scheduler, and takes part all the same.
            self._watches = bool(self._sum([float(isinstance(self._scheduler, ReduceLROnPlateau))])[0])
        normed = self._clip_norm is not None or self._scale is not None
        squares = self._squares() if normed else self._unless_finite()
        if self._counts or normed or self._watches:
            loss, count, squares = self._sum([record.loss, record.count, squares])
        if self._scale is None and not math.isfinite(squares):
            raise self._not_finite()
        if not (self._counts or normed or self._watches):
            return 1.0, True
        if self._counts and not count:
            raise TrainingError("loss() returned a count of 0 for the whole mini-batch; nothing was updated")
        divisor = count if self._counts else 1.0
        record.total_loss = loss / divisor
        factor = 1.0 / divisor
        if self._scale is not None:
            factor /= self._scale.value
            record.overflowed = not math.isfinite(squares)
            self._scale.settle(record.overflowed)
        if normed and not record.overflowed:
            record.gradient_norm = math.sqrt(squares) * factor
        if self._clip_norm is not None and record.gradient_norm is not None:
            factor *= min(1.0, self._clip_norm / (record.gradient_norm + TINY))
        return factor, not record.overflowed

    def _unless_finite(self) -> float:
        """Return 0, or what no sum makes finite if a gradient is not: ranks that add up anyway all see it."""
        return 0.0 if all_finite(self._reducer.complete()) else math.nan

    def _not_finite(self) -> TrainingError:
        """Return what to say of gradients that are not finite."""
        there = ((name, each.grad) for name, each in self._trained.items())
        name = first_not_finite((name, local(gradient)) for name, gradient in there if gradient is not None)
        if name is not None:
            place = f"stage {self._stage_of[name]}" + (", micro-batch 0" if self._plan.micro_batches == 1 else "")
            return TrainingError(f"the gradient of {name} ({place}) is not finite; nothing was updated")
        if len(self._everyone) > 1 and math.isfinite(self._squares()):
            return PeerLostError("the gradients of another rank are not finite; nothing was updated")
        return TrainingError("the norm of all gradients is too large for a number; nothing was updated")

    def _squares(self) -> float:
        """Return the sum of squares of the gradients that this rank answers for: of all ranks', the model's."""
        owned = (torch.view_as_real(each) if each.is_complex() else each for each in self._reducer.owned())
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in owned]
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    def _sum(self, values: list[float]) -> list[float]:
        # In the hosts' memory, where they are known and wanted: GPUs go on meanwhile.
        total = torch.tensor(values, dtype=torch.float64)
        self._transport.all_reduce(total, self._everyone).wait()
        return [float(each) for each in total.tolist()]

    def _step_scheduler(self, record: StepRecord) -> None:
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(record.total_loss or 0.0)
        elif isinstance(self._scheduler, LRScheduler):
            self._scheduler.step()


@contextmanager
def _stepping(what: str) -> Iterator[None]:
    """Say of an error of the user's optimizer or scheduler whose it is."""
    try:
        yield
    except (AutoparError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise TrainingError(f"the {what}'s step raised {type(error).__name__}: {error}") from error


def _check_steps(optimizer: torch.optim.Optimizer, model: UserModel) -> None:
    """Refuse an optimizer whose step calls for the loss again and again, as L-BFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise ModelError(
            f"{model.path}: optimizer() returned a {name}, whose step runs the model itself; use one whose step needs "
            "no closure"
        )
