"""Verify: a plan's ranks train as ``run`` has them, the plain loop beside them, and both are compared.

Both compute in float64 where the model can: then nothing but the order of additions differs, and what is promised is
what is allowed. Where that is not kept, or the model computes in its own types only, what rounding changes is found: by
moving every initial weight by its last bit. A fault changes more than that by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.doubled import in_double
from autopar.capture.plain import PlainRun, train_plainly
from autopar.capture.source import UserModel, load
from autopar.errors import AutoparError, CaptureError, ModelError
from autopar.formats.plan import Crossing, Plan
from autopar.formats.verified import Difference, Verified
from autopar.progress import Progress, untold
from autopar.ranks.pool import RankPool
from autopar.ranks.scratch import Scratch
from autopar.runtime.differences import PROMISED, Allowed, Holder, compare, holders_of
from autopar.runtime.launch import RunOptions, run
from autopar.runtime.room import check_room
from autopar.runtime.scope import check_scope
from autopar.runtime.settings import TrainSettings
from autopar.runtime.worker import load_for

__all__ = ["verify"]

MARGIN = 20
"""How many times what rounding was found to change is allowed where float64 does not run."""

SINGLE: Allowed = dict.fromkeys(PROMISED, 1e-5)
"""A hundred times the last bit of float32, which is allowed at least where float64 does not run."""


def verify(
    plan: Plan,
    model: str,
    data: Path | None,
    steps: int,
    timeout_s: float,
    progress: Progress = untold,
    pool: RankPool | None = None,
) -> Verified:
    """Train some steps by the plan's ranks, as processes of this host, and plainly; compare both.

    Args:
        plan: what is verified; ranks of one for GPUs compute on the CPU.
        model: MODEL, as :func:`autopar.capture.source.load` reads it.
        data: the file that feeds an ``hf:`` model, if it has one.
        steps: how many mini-batches are trained.
        timeout_s: longest that a rank may stand still.
        progress: told what is being done.
        pool: processes to use, if some are there already.

    Raises:
        UsageError: the plan cannot be run, or not on this host, or not be compared; says why.
        AutoparError: the model does not fit the plan, or a rank failed.
    """
    check_scope(plan)
    user = load(model, data, plan.model)
    reason = ""
    for double in (True, False):
        attempt = _Attempt(plan, model, data, steps, timeout_s, double)
        attempt.check(user)
        try:
            found = attempt.perform(progress, pool)
        except (ModelError, CaptureError) as error:
            if not double:
                raise
            reason = f"the model does not compute in float64 ({error})"
            continue
        return replace(found, notes=(*([reason] if reason else []), *found.notes))
    raise AssertionError("the second attempt returns or raises")


class _Attempt:
    """A verification in one type."""

    def __init__(self, plan: Plan, model: str, data: Path | None, steps: int, timeout_s: float, double: bool) -> None:
        self._asked, self._model, self._data = plan, model, data
        self._steps, self._timeout_s, self._double = steps, timeout_s, double
        self._plan = plan

    def check(self, user: UserModel) -> None:
        """Find the plan that is run, and refuse it where this host has too little memory."""
        shapes = _shapes(user, self._asked.seed)
        held = {**dict(shapes.named_parameters()), **dict(shapes.named_buffers())}
        sizes = {name: value.numel() * self._type(value.dtype).itemsize for name, value in held.items()}
        usual = sum(value.nbytes for value in held.values())
        self._plan = self._computed(sizes)
        check_room(self._asked, sizes, sum(sizes.values()) / usual if usual else 1.0)

    def perform(self, progress: Progress, pool: RankPool | None) -> Verified:
        """Train both ways, and compare.

        Raises:
            ModelError: the plain loop failed, or the model cannot be captured.
        """
        progress("training plainly", 0.0)
        truth = self._train()
        allowed, rounding = (PROMISED, _PROMISE) if self._double else self._found(truth, progress)
        with Scratch("verify") as scratch:
            progress(f"training on {len(self._plan.devices)} ranks", 0.0)
            settings = TrainSettings(double=self._double)
            options = RunOptions(self._steps, timeout_s=self._timeout_s, data=self._data, settings=settings)
            outcome = run(self._plan, self._model, replace(options, keep=scratch.path), pool=pool)
            progress("comparing", 0.0)
            holders = holders_of(self._plan, scratch.path, truth)
            differences = compare(outcome.report.loss, holders, truth, allowed)
            if self._double and _beyond_a_promise(differences):
                allowed, rounding = self._found(truth, progress)
                differences = compare(outcome.report.loss, holders, truth, allowed)
        computed = "float64" if self._double else "the types of the model"
        return Verified(
            self._steps,
            len(self._plan.devices),
            computed,
            rounding,
            differences,
            by_choice=self._asked.caveats,
            notes=tuple(self._notes()),
        )

    def _type(self, dtype: torch.dtype) -> torch.dtype:
        return in_double(dtype) if self._double else dtype

    def _computed(self, sizes: dict[str, int]) -> Plan:
        """Return the plan as it is run: on CPUs, without autocast, with tensors of the types that are computed in."""
        plan = self._asked
        return plan.model_copy(
            update={
                "device_type": "cpu",
                "precision": "fp64" if self._double else "fp32",
                "tensors": tuple(self._crossing(each) for each in plan.tensors),
                "tied": tuple(
                    each.model_copy(update={"bytes": sizes.get(each.parameter, each.bytes)}) for each in plan.tied
                ),
            }
        )

    def _crossing(self, crossing: Crossing) -> Crossing:
        planned = getattr(torch, crossing.dtype, None)
        if not isinstance(planned, torch.dtype):
            # Said to be wrong where the plan is held against the model.
            return crossing
        # Autocast halved what is float32 without it.
        plain = torch.float32 if self._asked.precision in ("bf16", "fp16") and planned.is_floating_point else planned
        computed = self._type(plain)
        size = crossing.bytes_per_sample // planned.itemsize * computed.itemsize
        return crossing.model_copy(update={"dtype": str(computed).removeprefix("torch."), "bytes_per_sample": size})

    def _train(self, moved: torch.dtype | None = None) -> PlainRun:
        user = load_for(TrainSettings(double=self._double), self._model, self._data, self._asked)
        built = user.factory
        if moved is not None:
            user = replace(user, factory=lambda: _moved(built(), moved))
        try:
            return train_plainly(user, self._plan, self._steps)
        except (AutoparError, MemoryError):
            raise
        except Exception as error:
            said = (str(error).strip().splitlines() or ["(no message)"])[0]
            raise ModelError(f"{user.path}: plain training raised {type(error).__name__}: {said}") from error

    def _found(self, truth: PlainRun, progress: Progress) -> tuple[Allowed, str]:
        """Return what rounding may change: a multiple of what it does where every weight is moved by its last bit."""
        progress("finding what rounding changes", 0.0)
        bits = torch.float64 if self._double else torch.float32
        with _Narrowing() as narrowing:
            moved = self._train(bits)
        least, at_least = (PROMISED, _PROMISE) if self._double else (SINGLE, "1e-5")
        if self._double and narrowing.narrowest is not None:
            bits = narrowing.narrowest
            moved = self._train(bits)
            # What is rounded to few bits, as a loss, may come out of both runs with the same ones, by chance.
            least, at_least = dict.fromkeys(PROMISED, MARGIN * torch.finfo(bits).eps), f"{MARGIN} times that bit"
        holder = Holder("", moved.gradients, moved.parameters, moved.buffers)
        allowed = {
            each.what: max(least[each.what], MARGIN * (each.largest or 0.0))
            for each in compare(moved.losses, [holder], truth, PROMISED)
        }
        bit = f"the last bit of {str(bits).removeprefix('torch.')}"
        rounding = f"{MARGIN} times what changes where every initial weight is moved by {bit}"
        return allowed, f"{rounding}, and {at_least} at least"

    def _notes(self) -> list[str]:
        plan, notes = self._asked, []
        if plan.device_type != "cpu":
            notes.append("the plan is for GPUs; its ranks computed on CPUs here, and GPUs round differently")
        if plan.precision in ("bf16", "fp16"):
            notes.append(f"the plan computes in {plan.precision}; both computed without autocast here")
        return notes


_PROMISE = "what docs/promises.md promises"


def _beyond_a_promise(differences: Sequence[Difference]) -> bool:
    """Tell whether differences that may be rounding are larger than promised: optimizers enlarge gradients of zero."""
    return all(each.largest is not None for each in differences) and not all(each.equal for each in differences)


def _shapes(user: UserModel, seed: int) -> nn.Module:
    try:
        return user.build(seed, hollow=True)
    except (CaptureError, ModelError):
        return user.build(seed)


def _moved(model: object, bits: torch.dtype) -> object:
    """Move every weight up or down by its last bit in a type."""
    if isinstance(model, nn.Module):
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.dtype) * 2 - 1
                    parameter.mul_(1 + signs * max(torch.finfo(each).eps for each in (bits, parameter.dtype)))
    return model


class _Narrowing(TorchDispatchMode):
    """Notes to how few bits float64 is cast, as some models do whatever their type."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrowest: torch.dtype | None = None
        """None where nothing is cast to fewer bits."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64 and made.is_floating_point():
            known = self.narrowest or torch.float64
            if torch.finfo(made.dtype).eps > torch.finfo(known).eps:
                self.narrowest = made.dtype
        return made
