"""Verify: a plan's ranks train as ``run`` has them, the plain loop beside them, and both are compared tensor by tensor.

In comes a plan; out come the largest differences, and what is allowed. Both compute in float64 where the model can:
then nothing but the order of additions differs, and what is promised is what is allowed. Where that is not so, or the
model computes in its own types only, what rounding changes is found by moving every initial weight by its last bit. A
fault changes more than that by orders of magnitude. A host without the memory for all ranks and the plain loop is
refused before anything starts.

Why: docs/design/decisions.md, "Runtime: Rounding is measured".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.cache.recall import build_and_capture
from autopar.capture.model.source import UserModel, load
from autopar.capture.plain.histories import most_versions
from autopar.capture.plain.loop import in_double, train_plainly
from autopar.capture.plain.mini_batch import PlainRun
from autopar.errors import AutoparError, CaptureError, ModelError, UsageError, cause_of
from autopar.formats.cuts import ParameterCut
from autopar.formats.plan import Plan
from autopar.formats.pulls import PullLog, Taken
from autopar.formats.report import Difference, Verification
from autopar.formats.stage import Crossing
from autopar.options.train import PULLS, RunOptions, TrainSettings
from autopar.progress import Progress, no_progress
from autopar.ranks.pool import RankPool
from autopar.ranks.scratch import Scratch
from autopar.runtime.checkpoint import weights
from autopar.runtime.checkpoint.saving import BUFFERS, GRADIENTS, PARAMETERS, UNREAD, kept_folder
from autopar.runtime.settings import check_scope
from autopar.runtime.stage.parameters import cuts_of, first_stages, part_of_tensor
from autopar.runtime.start.launch import run
from autopar.runtime.start.worker import load_for
from autopar.runtime.start.workspace import host_memory_bytes

_Allowed = Mapping[str, float]
"""Kind -> the largest difference: of gradients, over the model's largest; of others, over their largest element + 1."""
PROMISED: _Allowed = {"losses": 1e-10, "gradients": 1e-12, "parameters": 1e-10, "buffers": 1e-10}
"""Of float64: docs/howto/verify.md."""

Tensors = Mapping[str, torch.Tensor]


class Holder(NamedTuple):
    """What one rank holds in the end, or what a whole run in one process gives."""

    where: str
    """Which rank, in words that follow a tensor's name."""
    gradients: Mapping[str, torch.Tensor | None]
    parameters: Tensors
    buffers: Tensors
    cuts: Mapping[str, ParameterCut] = {}
    """Of the parameters of which it has a part."""
    part: int = 0
    pipeline: int = 0
    """Which it is of."""

    def of(self, name: str, whole: torch.Tensor | None) -> torch.Tensor | None:
        """Return what it should have of a parameter or buffer, or of its gradient."""
        cut = self.cuts.get(name)
        return whole if cut is None or whole is None else part_of_tensor(cut, self.part, whole)


class _FolderTensors(Mapping[str, torch.Tensor]):
    """The tensors of a folder, each read when it is asked for."""

    def __init__(self, folder: Path, *of: Mapping[str, object]) -> None:
        """Take the folder, and, where not all of its tensors count, in which names those are that do."""
        self._folder = folder
        self._names = sorted(set(weights.shapes(folder)).intersection(*(each.keys() for each in of)))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return weights.read(self._folder, {name})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _holders_of(plan: Plan, folder: Path, truth: PlainRun) -> list[Holder]:
    """Return what the ranks of a run have kept in a folder; buffers are the first replicas' and pipeline's."""
    found = []
    for rank in range(len(plan.devices)):
        gradients, parameters, buffers = (
            _FolderTensors(kept_folder(folder, rank, what)) for what in (GRADIENTS, PARAMETERS, BUFFERS)
        )
        own = plan.ownership.ranks[rank]
        place = own.part, plan.pipeline_of(own.stage)
        written = buffers if own.replica == place[1] == 0 else {}
        found.append(Holder(f" on rank {rank}", gradients, parameters, written, cuts_of(plan, rank), *place))
    unread = kept_folder(folder, 0, UNREAD)
    parameters, buffers = _FolderTensors(unread, truth.parameters), _FolderTensors(unread, truth.buffers)
    return [*found, Holder(", which no layer reads", {}, parameters, buffers)]


def compare(
    losses: Sequence[float], holders: Sequence[Holder], truth: PlainRun, tolerances: _Allowed
) -> tuple[Difference, ...]:
    """Return the largest difference of every kind; what one side alone has differs without end."""
    found: dict[str, list[tuple[float, str]]] = {what: [] for what in PROMISED}
    loss_size = 1 + max(map(abs, truth.losses), default=0.0)
    for step, (loss, expected) in enumerate(zip(losses, truth.losses, strict=True)):
        found["losses"].append((abs(loss - expected) / loss_size, f"step {step}"))
    every = (each for gradients in (truth.gradients, *truth.others) for each in gradients.values())
    largest = max((_largest(each) for each in every if each is not None), default=0.0)
    for holder in holders:
        known_gradients = truth.gradients_of(holder.pipeline)
        for name in holder.parameters:
            mine, theirs = holder.gradients.get(name), holder.of(name, known_gradients.get(name))
            found["gradients"].append(_of_gradients(mine, theirs, largest, f"{name}{holder.where}"))
    for what in ("parameters", "buffers"):
        expected_values: Tensors = getattr(truth, what)
        for holder in holders:
            values: Tensors = getattr(holder, what)
            for name, value in values.items():
                known = holder.of(name, expected_values.get(name))
                difference = math.inf if known is None else _distance(value, known) / (1 + _largest(known))
                found[what].append((difference, f"{name}{holder.where}"))
        absent = expected_values.keys() - {name for holder in holders for name in getattr(holder, what)}
        found[what] += [(math.inf, f"{name}, which no rank holds") for name in absent]
    units = {"losses": "the largest loss + 1", "gradients": "the model's largest gradient"}
    return tuple(
        _largest_of(what, each, tolerances[what], units.get(what, "their largest element + 1"))
        for what, each in found.items()
    )


def _of_gradients(
    mine: torch.Tensor | None, theirs: torch.Tensor | None, largest: float, place: str
) -> tuple[float, str]:
    """Return how two gradients differ, and where; one that is none differs from one that is zero."""
    if mine is None or theirs is None:
        if mine is theirs:
            return 0.0, place
        side = "none, where plain training has one" if mine is None else "one, where plain training has none"
        return math.inf, f"{place}: {side}"
    difference = _distance(mine, theirs)
    return (difference / largest if largest else math.inf if difference else 0.0), place


def _distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference of two tensors; without end where they are of different shapes or types."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return math.inf
    if mine.is_sparse or theirs.is_sparse:
        mine, theirs = mine.to_dense(), theirs.to_dense()
    differ = ~((mine == theirs) | (mine.isnan() & theirs.isnan()))
    if not differ.any():
        return 0.0
    wide = torch.complex128 if mine.is_complex() else torch.float64
    found = float((mine[differ].to(wide) - theirs[differ].to(wide)).abs().max())
    return math.inf if math.isnan(found) else found


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value that is finite."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    values = dense.abs().double() if not dense.is_floating_point() else dense.double().abs()
    finite = values[values.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _largest_of(what: str, differences: Sequence[tuple[float, str]], tolerance: float, unit: str) -> Difference:
    """Return the largest of some differences, each with where it is; what is no number is larger than any."""
    none = [each for each in differences if math.isnan(each[0])]
    largest, where = max(none[-1:] or differences, key=lambda each: each[0], default=(0.0, ""))
    return Difference(what, len(differences), largest if math.isfinite(largest) else None, where, tolerance, unit)


def in_float64(plan: Plan, user: UserModel) -> Plan:
    """Return a plan as :func:`verify` runs it in float64: on CPUs, with tensors of as many bytes."""
    shapes = _shapes(user, plan.seed)
    widths = {name: _type(each.dtype, double=True).itemsize for name, each in shapes.named_parameters()}
    sizes = {name: each.numel() * widths[name] for name, each in shapes.named_parameters()}
    return _plan_to_run(plan, sizes, double=True)


def _type(dtype: torch.dtype, double: bool) -> torch.dtype:
    return in_double(dtype) if double else dtype


def _plan_to_run(plan: Plan, sizes: Mapping[str, int], double: bool) -> Plan:
    """Return a plan as it is run: on CPUs, without autocast, with tensors of the types that are computed in."""
    tied = (each.model_copy(update={"bytes": sizes.get(each.parameter, each.bytes)}) for each in plan.tied)
    return plan.model_copy(
        update={
            "device_type": "cpu",
            "nodes": (),
            "precision": "fp64" if double else "fp32",
            "tensors": tuple(_crossing(each, plan, double) for each in plan.tensors),
            "tied": tuple(tied),
        }
    )


def _crossing(crossing: Crossing, plan: Plan, double: bool) -> Crossing:
    planned = getattr(torch, crossing.dtype, None)
    if not isinstance(planned, torch.dtype):
        # Said to be wrong where the plan is held against the model.
        return crossing
    # Autocast halved what is float32 without it.
    plain = torch.float32 if plan.precision in ("bf16", "fp16") and planned.is_floating_point else planned
    computed = _type(plain, double)
    size = crossing.bytes_per_sample // planned.itemsize * computed.itemsize
    return crossing.model_copy(update={"dtype": str(computed).removeprefix("torch."), "bytes_per_sample": size})


RANK_BYTES = 200 * 2**20
"""Of a process that has imported torch, what it does not share with others."""
COPIES = 6
"""Of the model in the plain loop: values, gradients, two states of an optimizer, and what is compared of both."""


def available_bytes() -> int:
    """Return the memory of this host that processes can still have."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return host_memory_bytes()
    found = dict(line.split(":", 1) for line in lines)
    kibibytes = found.get("MemAvailable", "").split()
    return int(kibibytes[0]) * 1024 if kibibytes else host_memory_bytes()


def check_memory(plan: Plan, model_bytes: Mapping[str, int], wider: float) -> None:
    """Refuse to start what this host's memory does not hold.

    Args:
        plan: its ranks run at once, and hold what was predicted of them.
        model_bytes: of every parameter and buffer, as it is computed.
        wider: how many times as many bytes an element has as in the plan.

    Raises:
        UsageError: says what is needed, and what is there.
    """
    there, whole = available_bytes(), sum(model_bytes.values())
    # Of each version, there may be another that is made of it, or two.
    copies = COPIES * len(plan.stages_by_pipeline) + (2 if plan.ahead == "counted" else 3) * most_versions(plan)
    peaks = [chunks[0] for chunks in plan.groups]
    # Of a team, the plan says what its ranks hold together.
    held = sum(plan.stages[stage].replicas * round(wider * plan.predicted.peak_bytes[stage]) for stage in peaks)
    ranks = RANK_BYTES * len(plan.devices) + held
    for needed, what in (
        (copies * whole, f"the plain loop of a model of {_text(whole)}"),
        (ranks + copies * whole, f"{len(plan.devices)} ranks beside the plain loop"),
    ):
        if needed > there:
            raise UsageError(
                f"verifying takes about {_text(needed)} for {what}, this host has {_text(there)} of memory left; "
                "verify on a larger host, or a plan of fewer ranks or of a smaller model"
            )


def _text(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


_MARGIN = 20
"""How many times what rounding was found to change is allowed where float64 does not run."""

SINGLE: _Allowed = dict.fromkeys(PROMISED, 1e-5)
"""A hundred times the last bit of float32, which is allowed at least where float64 does not run."""


def verify(
    plan: Plan,
    model: str,
    data: Path | None,
    steps: int,
    timeout_s: float,
    progress: Progress = no_progress,
    pool: RankPool | None = None,
) -> Verification:
    """Train some steps by the plan's ranks, as processes of this host, and plainly; compare both.

    Args:
        plan: what is verified; ranks of one for GPUs compute on the CPU.
        model: MODEL, as :func:`autopar.capture.model.source.load` reads it.
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
    exact, own = (_VerificationRun(plan, model, data, steps, timeout_s, double) for double in (True, False))
    exact.check(user)
    try:
        return exact.perform(progress, pool)
    except (ModelError, CaptureError) as error:
        reason = f"the model does not compute in float64 ({error})"
    own.check(user)
    found = own.perform(progress, pool)
    return replace(found, notes=(reason, *found.notes))


@dataclass
class _VerificationRun:
    """A verification in one type."""

    requested_plan: Plan
    model: str
    data: Path | None
    steps: int
    timeout_s: float
    double: bool
    _taken: Sequence[Sequence[Taken]] | None = None
    """By rank, what the pulls of an eager run took."""

    def check(self, user: UserModel) -> None:
        """Find the plan that is run, and refuse it where this host has too little memory."""
        shapes = _shapes(user, self.requested_plan.seed)
        held = {**dict(shapes.named_parameters()), **dict(shapes.named_buffers())}
        sizes = {name: value.numel() * _type(value.dtype, self.double).itemsize for name, value in held.items()}
        usual = sum(value.nbytes for value in held.values())
        self._plan = _plan_to_run(self.requested_plan, sizes, self.double)
        check_memory(self.requested_plan, sizes, sum(sizes.values()) / usual if usual else 1.0)

    def perform(self, progress: Progress, pool: RankPool | None) -> Verification:
        """Train both ways, and compare.

        Raises:
            ModelError: the plain loop failed, or the model cannot be captured.
        """
        progress("training plainly", 0.0)
        truth = self._train()
        allowed, rounding = (PROMISED, _PROMISE) if self.double else self._rounding_tolerances(truth, progress)
        with Scratch("verify") as scratch:
            progress(f"training on {len(self._plan.devices)} ranks", 0.0)
            log = scratch.path / PULLS if self._plan.eager else None
            options = RunOptions(
                self.steps, timeout_s=self.timeout_s, data=self.data, keep=scratch.path, double=self.double, pulls=log
            )
            outcome = run(self._plan, self.model, options, pool=pool)
            if log is not None:
                # What pulls took is known now.
                self._taken = PullLog.load(log).fills[0].taken
                progress("training plainly", 0.0)
                truth = self._train()
            progress("comparing", 0.0)
            holders = _holders_of(self._plan, scratch.path, truth)
            differences = compare(outcome.report.loss, holders, truth, allowed)
            # What rounding may be is more than promised where optimizers enlarge gradients of zero.
            are_numbers = all(each.largest is not None for each in differences)
            if self.double and are_numbers and not all(each.equal for each in differences):
                allowed, rounding = self._rounding_tolerances(truth, progress)
                differences = compare(outcome.report.loss, holders, truth, allowed)
        computed = "float64" if self.double else "the types of the model"
        return Verification(
            self.steps,
            len(self._plan.devices),
            computed,
            rounding,
            differences,
            by_choice=self.requested_plan.accepted,
            notes=tuple(self._notes()),
        )

    def _train(self, bits: torch.dtype | None = None) -> PlainRun:
        user = load_for(TrainSettings(double=self.double), self.model, self.data, self.requested_plan)
        built = user.factory
        if bits is not None:
            user = replace(user, factory=lambda: _perturb_weights(built(), bits))
        try:
            stage_of, others = {}, []
            if self._plan.policy.keeps_versions or user.optimizer_options:
                # Stages have versions or optimizers of their own.
                graph = build_and_capture(user, self._plan.seed)[1]
                stage_of, *others = (first_stages(each, graph) for each in self._plan.separate)
            return train_plainly(user, self._plan, self.steps, stage_of=stage_of, others=others, taken=self._taken)
        except (AutoparError, MemoryError):
            raise
        except Exception as error:
            raise ModelError(f"{user.path}: plain training raised {cause_of(error)}") from error

    def _rounding_tolerances(self, truth: PlainRun, progress: Progress) -> tuple[_Allowed, str]:
        """Return what rounding may change: a multiple of what it does where every weight is moved by its last bit."""
        progress("finding what rounding changes", 0.0)
        bits = torch.float64 if self.double else torch.float32
        with _CastRecorder() as narrowing:
            moved = self._train(bits)
        least, at_least = (PROMISED, _PROMISE) if self.double else (SINGLE, "1e-5")
        if self.double and narrowing.narrowest is not None:
            bits = narrowing.narrowest
            moved = self._train(bits)
            # What is rounded to few bits, as a loss, may come out of both runs with the same ones, by chance.
            least, at_least = dict.fromkeys(PROMISED, _MARGIN * torch.finfo(bits).eps), f"{_MARGIN} times that bit"
        holder = Holder("", moved.gradients, moved.parameters, moved.buffers)
        allowed = {
            each.what: max(least[each.what], _MARGIN * (each.largest or 0.0))
            for each in compare(moved.losses, [holder], truth, PROMISED)
        }
        bit = f"the last bit of {str(bits).removeprefix('torch.')}"
        rounding = f"{_MARGIN} times what changes where every initial weight is moved by {bit}"
        return allowed, f"{rounding}, and {at_least} at least"

    def _notes(self) -> list[str]:
        plan, notes = self.requested_plan, []
        if plan.device_type != "cpu":
            notes.append("the plan is for GPUs; its ranks computed on CPUs here, and GPUs round differently")
        if plan.precision in ("bf16", "fp16"):
            notes.append(f"the plan computes in {plan.precision}; both computed without autocast here")
        return notes


_PROMISE = "what docs/howto/verify.md promises"


def _shapes(user: UserModel, seed: int) -> nn.Module:
    try:
        return user.build(seed, on_meta=True)
    except (CaptureError, ModelError):
        return user.build(seed)


def _perturb_weights(model: object, bits: torch.dtype) -> object:
    """Move every weight up or down by its last bit in a type."""
    if isinstance(model, nn.Module):
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.dtype) * 2 - 1
                    parameter.mul_(1 + signs * max(torch.finfo(each).eps for each in (bits, parameter.dtype)))
    return model


class _CastRecorder(TorchDispatchMode):
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
