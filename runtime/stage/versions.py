"""WeightVersions: earlier values of a stage's parameters, for forwards and backwards that come behind an update.

In come parameters that an optimizer changes in place. A forward that sees an earlier version runs on memory of that
version, put into the parameters meanwhile. What autograd saves of a parameter, or of a view of it, is kept as a place
in it, and taken from the version that is due in the backward: so no micro-batch keeps weights of its own (Narayanan et
al., "PipeDream", SOSP 2019, copies them for each). A version is copied when an update is about to end it, if versions
are kept at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks

from autopar.depths import UpdatesAhead
from autopar.errors import UsageError
from autopar.policies import DECAY, rate_factor


class SavedWeights:
    """Which weights the backward of a micro-batch takes its parameters from."""

    version = 0


class NewestWeights:
    """Of a pipeline with flushes: all that are in flight see the newest weights, which autograd saves itself."""

    differences: Mapping[torch.nn.Parameter, torch.Tensor] = MappingProxyType({})
    """What a run that goes on needs of each parameter beside it; empty as long as there is nothing."""

    def forward(self, distance: int) -> AbstractContextManager[SavedWeights]:
        """Return the context of a forward that sees the weights so many updates before the newest."""
        return _NEWEST

    def backward(self, weights: SavedWeights, distance: int) -> AbstractContextManager[object]:
        """Return the context of the backward of a forward; it sees weights so many updates before the newest."""
        return _NEWEST

    def updating(self, step: int) -> AbstractContextManager[object]:
        """Return the context of a mini-batch's update, which ends the newest version: it is kept, if versions are."""
        return _NEWEST

    def predict(self) -> None:
        """Make what the forwards of the mini-batch that comes see."""

    def correct(self) -> None:
        """Make what backwards see until the next update."""

    def push(self) -> None:
        """Begin to tell other pipelines what a wave has changed."""

    def pull(self) -> None:
        """Add what others have changed in the next wave."""

    def drain(self) -> None:
        """End what pushes have begun, once the pipeline is empty; then all hold the same weights."""

    def refill(self, start: int) -> None:
        """Count versions from the parameters as they are, the pipeline being empty before mini-batch ``start``."""

    def check_kept(self, nodes: Iterable[Node]) -> None:
        """Refuse a function of the user's own that keeps a part of a parameter for its backward, by itself.

        What autograd saves is packed, and parameters have the version due: of anything else nobody knows.

        Args:
            nodes: where the backward of a forward begins.

        Raises:
            UsageError: names the function.
        """

    def resume(self, read: Callable[[torch.nn.Parameter], torch.Tensor | None]) -> None:
        """Go on with ``differences`` as they were; ``read`` gives that of a parameter, if there was one."""


_NEWEST = nullcontext(SavedWeights())


class _WeightView(NamedTuple):
    """A view of a parameter's memory."""

    memory: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _OtherTensor(NamedTuple):
    """Another tensor, and how often it had been changed when it was saved."""

    tensor: torch.Tensor
    changes: int


class WeightVersions(NewestWeights):
    """The versions of one rank's trained parameters; version v has v updates since the pipeline was filled."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], version_count: int, *, recomputes: bool) -> None:
        """Begin with the parameters as they are.

        Args:
            parameters: those that are trained.
            version_count: how many versions are needed at a time, the newest among them.
            recomputes: whether layers run forward again in their backward, or may read parameters there.
        """
        self._parameters = [each for each in parameters if each.requires_grad]
        self._recomputes, self._slots = recomputes, version_count - 1
        memories: dict[int, torch.Tensor] = {}
        for parameter in self._parameters:
            storage = parameter.untyped_storage()
            if storage.data_ptr() not in memories:
                whole = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                memories[storage.data_ptr()] = whole.set_(storage)
        self._newest_memories = list(memories.values())
        """What parameters lie in, each as one row of elements."""
        self._memory_at = {address: index for index, address in enumerate(memories)}
        self._memory_of = {each: self._memory_at[each.untyped_storage().data_ptr()] for each in self._parameters}
        self._earlier: dict[int, list[torch.Tensor]] = {}
        """By slot; versions use them in turn."""
        self.newest = 0

    def refill(self, start: int) -> None:
        """See :class:`NewestWeights`."""
        self.newest = 0

    def check_kept(self, nodes: Iterable[Node]) -> None:
        """See :class:`NewestWeights`."""
        ahead = list(nodes)
        seen = set(ahead)
        while ahead:
            node = ahead.pop()
            if isinstance(cast(object, node), BackwardCFunction) and any(map(self._is_part, vars(node).values())):
                raise UsageError(
                    f"function {type(node).__name__.removesuffix('Backward')} keeps a part of a parameter in its "
                    "context, of which there are versions; hand it to save_for_backward(), or plan with `policy='sync'`"
                )
            following = [each for each, _ in node.next_functions if each is not None and each not in seen]
            seen.update(following)
            ahead += following

    def _is_part(self, value: object) -> bool:
        """Whether something is a view of a parameter, and no parameter."""
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
            return False
        return value.layout == torch.strided and value.untyped_storage().data_ptr() in self._memory_at

    @contextmanager
    def forward(self, distance: int) -> Iterator[SavedWeights]:
        """See :class:`NewestWeights`."""
        weights = SavedWeights()
        weights.version = max(0, self.newest - distance)
        unpack = partial(self._unpack, weights)
        with self._holding(self._of_forward(weights)), saved_tensors_hooks(self._pack, unpack):
            yield weights

    @contextmanager
    def backward(self, weights: SavedWeights, distance: int) -> Iterator[None]:
        """See :class:`NewestWeights`."""
        weights.version = max(0, self.newest - distance)
        with self._holding(self._of_backward(weights) if self._recomputes else self._newest_memories):
            yield

    @contextmanager
    def updating(self, step: int) -> Iterator[None]:
        """See :class:`NewestWeights`."""
        if self._slots:
            slot = self.newest % self._slots
            if slot in self._earlier:
                _copy(self._earlier[slot], self._newest_memories)
            else:
                self._earlier[slot] = self._new_memories()
        yield
        self.newest += 1

    def _new_memories(self) -> list[torch.Tensor]:
        """Return copies of what parameters lie in, whose places are known from then on."""
        copies = [memory.clone() for memory in self._newest_memories]
        self._memory_at |= {each.untyped_storage().data_ptr(): index for index, each in enumerate(copies)}
        return copies

    @contextmanager
    def _holding(self, memories: list[torch.Tensor]) -> Iterator[None]:
        """Return the context in which parameters have the values of other memories."""
        if memories is self._newest_memories:
            yield
            return
        own = [parameter.data for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.data = self._view(parameter, memories)
        try:
            yield
        finally:
            for parameter, data in zip(self._parameters, own, strict=True):
                parameter.data = data

    def _view(self, parameter: torch.nn.Parameter, memories: list[torch.Tensor]) -> torch.Tensor:
        """Return a parameter's place in other memories."""
        whole = memories[self._memory_of[parameter]]
        return whole.as_strided(parameter.size(), parameter.stride(), parameter.storage_offset())

    def _of_forward(self, weights: SavedWeights) -> list[torch.Tensor]:
        """Return what a forward that begins sees."""
        return self._of_backward(weights)

    def _of_backward(self, weights: SavedWeights) -> list[torch.Tensor]:
        """Return what a backward that runs sees."""
        version = weights.version
        return self._newest_memories if version == self.newest else self._earlier[version % self._slots]

    def _pack(self, tensor: torch.Tensor) -> _WeightView | _OtherTensor:
        strided = tensor.layout == torch.strided
        memory = self._memory_at.get(tensor.untyped_storage().data_ptr()) if strided else None
        if memory is None:
            return _OtherTensor(tensor, tensor._version)
        if tensor.is_conj() or tensor.is_neg():
            raise UsageError(
                "a parameter is conjugated or negated as it is read, which is taken from no other version; plan with "
                "`policy='sync'`"
            )
        return _WeightView(memory, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, weights: SavedWeights, place: _WeightView | _OtherTensor) -> torch.Tensor:
        if isinstance(place, _OtherTensor):
            if place.tensor._version != place.changes:
                # Autograd says so itself of what no hook has packed.
                raise RuntimeError("a tensor that the backward needs has been changed in place since it was saved")
            return place.tensor
        whole = self._of_backward(weights)[place.memory]
        return (whole if whole.dtype == place.dtype else whole.view(place.dtype)).as_strided(*place[2:])


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


class PredictedWeights(WeightVersions):
    """Forwards and backwards see weights that are predicted from the newest and the optimizer's state, or the newest.

    See :class:`autopar.policies.Predict`.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        ahead: UpdatesAhead,
        *,
        recomputes: bool,
    ) -> None:
        """Prepare.

        Args:
            parameters: those that are trained.
            optimizer: theirs; None without any.
            ahead: how many updates predictions are ahead.
            recomputes: whether layers run forward again in their backward, or may read parameters there.

        Raises:
            UsageError: no rule is known for the optimizer.
        """
        super().__init__(parameters, 1, recomputes=recomputes)
        self._optimizer, self._ahead = optimizer, ahead
        if optimizer is not None and any(ahead):
            _check_predictable(optimizer)
        self._predicted: list[torch.Tensor] = []
        """What forwards see; empty: the newest weights."""
        self._corrected: list[torch.Tensor] = []
        """What backwards see."""

    def refill(self, start: int) -> None:
        """See :class:`NewestWeights`."""
        super().refill(start)
        if self._ahead.backward:
            # No update of this process may have been yet.
            self.correct()

    def _of_forward(self, weights: SavedWeights) -> list[torch.Tensor]:
        return self._predicted or self._newest_memories

    def _of_backward(self, weights: SavedWeights) -> list[torch.Tensor]:
        return self._corrected or self._newest_memories

    def predict(self) -> None:
        """See :class:`NewestWeights`."""
        self._predicted = self._make(self._predicted, self._ahead.forward)

    def correct(self) -> None:
        """See :class:`NewestWeights`."""
        self._corrected = self._make(self._corrected, self._ahead.backward)

    @torch.no_grad()
    def _make(self, memories: list[torch.Tensor], ahead: int) -> list[torch.Tensor]:
        """Return a prediction, in the memories of the one before, if there are some."""
        if self._optimizer is None:
            return memories
        if memories:
            _copy(memories, self._newest_memories)
        else:
            memories = self._new_memories()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                move = _next_step(group, self._optimizer.state.get(parameter, {}))
                if move is not None and parameter in self._memory_of:
                    self._view(parameter, memories).sub_(move, alpha=ahead)
        return memories


def _check_predictable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose next steps no rule tells.

    Raises:
        UsageError: names it, and what to do.
    """
    kind = type(optimizer)
    groups = optimizer.param_groups
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        known = not any(group["amsgrad"] or group["maximize"] for group in groups)
    else:
        known = kind is torch.optim.SGD and all(
            group["momentum"] and not group["nesterov"] and not group["maximize"] for group in groups
        )
    if not known:
        raise UsageError(
            f"weight policy predict knows the next steps of Adam, AdamW and SGD with momentum, in their plain forms, "
            f"and not of this {kind.__name__}; plan with `policy='stash'`"
        )


def _next_step(group: Mapping[str, Any], state: Mapping[str, Any]) -> torch.Tensor | None:
    """Return what the optimizer's next step is expected to take from a parameter; None before its first."""
    if state.get("momentum_buffer") is not None:
        return cast(torch.Tensor, group["lr"] * state["momentum_buffer"])
    if "exp_avg" not in state:
        return None
    steps, (first, second) = float(state["step"]), group["betas"]
    mean, square = state["exp_avg"] / (1 - first**steps), state["exp_avg_sq"] / (1 - second**steps)
    return cast(torch.Tensor, group["lr"] * mean / (square.sqrt() + group["eps"]))


class CorrectedWeights(WeightVersions):
    """Forwards see the newest weights, backwards the newest less what they have changed by; rates are reduced at first.

    See :class:`autopar.policies.PipeMare`.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        tau: float,
        anneal_steps: int,
        synchronous_steps: int,
        *,
        recomputes: bool,
    ) -> None:
        """Prepare.

        Args:
            parameters: those that are trained.
            optimizer: theirs; None without any.
            tau: the mean of updates from a forward to its own update.
            anneal_steps: mini-batches for which rates are reduced.
            synchronous_steps: mini-batches before, which see one version.
            recomputes: whether layers run forward again in their backward, or may read parameters there.
        """
        super().__init__(parameters, 1, recomputes=recomputes)
        self._tau, self._anneal_steps, self._synchronous_steps = tau, anneal_steps, synchronous_steps
        self._decay = DECAY ** (1 / tau) if tau else 0.0
        self._corrected: list[torch.Tensor] = []
        self._differences: list[torch.Tensor] = []
        self._step, self._corrects = 0, False
        self._rates: list[Any] = []
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: self._reduce_rates(optimizer))
            optimizer.register_step_post_hook(lambda *_: self._restore_rates(optimizer))

    def refill(self, start: int) -> None:
        """See :class:`NewestWeights`."""
        super().refill(start)
        self._corrects = start >= self._synchronous_steps and self._tau > 0

    @contextmanager
    def updating(self, step: int) -> Iterator[None]:
        """See :class:`NewestWeights`."""
        self._step = step - self._synchronous_steps
        if self._corrects:
            if self._corrected:
                _copy(self._corrected, self._newest_memories)
            else:
                self._begin()
        with super().updating(step):
            yield

    def _begin(self) -> None:
        self._corrected = self._new_memories()
        self._differences = [torch.zeros_like(each) for each in self._corrected]
        self.differences = {each: self._view(each, self._differences) for each in self._parameters}

    @torch.no_grad()
    def resume(self, read: Callable[[torch.nn.Parameter], torch.Tensor | None]) -> None:
        """See :class:`NewestWeights`."""
        found = {each: read(each) for each in self._parameters} if self._tau else {}
        if all(each is None for each in found.values()):
            return
        self._begin()
        for parameter, difference in found.items():
            if difference is not None:
                self.differences[parameter].copy_(difference)
        for corrected, difference in zip(self._corrected, self._differences, strict=True):
            corrected.sub_(difference, alpha=self._tau)

    @torch.no_grad()
    def correct(self) -> None:
        """See :class:`NewestWeights`."""
        if not self._corrects:
            return
        for corrected, difference, newest in zip(
            self._corrected, self._differences, self._newest_memories, strict=True
        ):
            # Until now, what is to be corrected holds the weights before the update.
            difference.mul_(self._decay).add_(newest - corrected, alpha=1 - self._decay)
            torch.sub(newest, difference, alpha=self._tau, out=corrected)

    def _of_forward(self, weights: SavedWeights) -> list[torch.Tensor]:
        return self._newest_memories

    def _of_backward(self, weights: SavedWeights) -> list[torch.Tensor]:
        return self._corrected if self._corrects and self._corrected else self._newest_memories

    def _reduce_rates(self, optimizer: torch.optim.Optimizer) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        factor = rate_factor(self._tau, self._step, self._anneal_steps) if self._step >= 0 else 1.0
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def _restore_rates(self, optimizer: torch.optim.Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
