"""WeightVersions: earlier values of a stage's parameters, for forwards and backwards that come behind an update.

In come parameters that an optimizer changes in place. A forward that sees an earlier version runs on memory of that
version, put into the parameters meanwhile. What autograd saves of a parameter, or of a view of it, is kept as a place
in it, and taken from the version that is due in the backward: so no micro-batch keeps weights of its own (Narayanan et
al., "PipeDream", SOSP 2019, copies them for each). A version is copied when an update is about to end it, if versions
are kept at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks


class SavedWeights:
    """Which version the backward of a micro-batch takes its parameters from."""

    version = 0


class NewestWeights:
    """Of a pipeline with flushes: all that are in flight see the newest weights, which autograd saves itself."""

    bytes = 0

    def __init__(self) -> None:
        self._nothing = nullcontext(SavedWeights())

    def forward(self, distance: int) -> AbstractContextManager[SavedWeights]:
        """See :class:`WeightVersions`."""
        return self._nothing

    def backward(self, weights: SavedWeights, distance: int) -> AbstractContextManager[object]:
        """See :class:`WeightVersions`."""
        return self._nothing

    def begin_update(self) -> None:
        """See :class:`WeightVersions`."""

    def refill(self) -> None:
        """See :class:`WeightVersions`."""


class _Place(NamedTuple):
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


class WeightVersions:
    """The versions of one rank's trained parameters; version v has v updates since the pipeline was filled."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], version_count: int, *, recomputes: bool) -> None:
        """Begin with the parameters as they are.

        Args:
            parameters: those that are trained.
            version_count: how many versions are needed at a time, the newest among them.
            recomputes: whether layers run forward again in their backward.
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
        self._memory_of = [self._memory_at[each.untyped_storage().data_ptr()] for each in self._parameters]
        self._earlier: dict[int, list[torch.Tensor]] = {}
        """By slot; versions use them in turn."""
        self.newest = 0

    @property
    def bytes(self) -> int:
        """What earlier versions take."""
        return sum(each.nbytes for memories in self._earlier.values() for each in memories)

    def refill(self) -> None:
        """Count versions from the parameters as they are, the pipeline being empty."""
        self.newest = 0

    @contextmanager
    def forward(self, distance: int) -> Iterator[SavedWeights]:
        """Return the context of a forward that sees the weights so many updates before the newest."""
        weights = SavedWeights()
        weights.version = max(0, self.newest - distance)
        unpack = partial(self._unpack, weights)
        with self._holding(weights.version), saved_tensors_hooks(self._pack, unpack):
            yield weights

    @contextmanager
    def backward(self, weights: SavedWeights, distance: int) -> Iterator[None]:
        """Return the context of the backward of a forward; it sees weights so many updates before the newest."""
        weights.version = max(0, self.newest - distance)
        with self._holding(weights.version if self._recomputes else self.newest):
            yield

    def begin_update(self) -> None:
        """Keep the newest version, which the update that follows changes."""
        if self._slots:
            slot = self.newest % self._slots
            if slot in self._earlier:
                for copy, memory in zip(self._earlier[slot], self._newest_memories, strict=True):
                    copy.copy_(memory)
            else:
                self._earlier[slot] = copies = [memory.clone() for memory in self._newest_memories]
                self._memory_at |= {each.untyped_storage().data_ptr(): index for index, each in enumerate(copies)}
        self.newest += 1

    @contextmanager
    def _holding(self, version: int) -> Iterator[None]:
        """Return the context in which parameters have the values of a version."""
        if version == self.newest:
            yield
            return
        own = [parameter.data for parameter in self._parameters]
        for parameter, memory in zip(self._parameters, self._memory_of, strict=True):
            whole = self._memories(version)[memory]
            parameter.data = whole.as_strided(parameter.size(), parameter.stride(), parameter.storage_offset())
        try:
            yield
        finally:
            for parameter, data in zip(self._parameters, own, strict=True):
                parameter.data = data

    def _memories(self, version: int) -> list[torch.Tensor]:
        return self._newest_memories if version == self.newest else self._earlier[version % self._slots]

    def _pack(self, tensor: torch.Tensor) -> _Place | _OtherTensor:
        strided = tensor.layout == torch.strided
        memory = self._memory_at.get(tensor.untyped_storage().data_ptr()) if strided else None
        if memory is None:
            return _OtherTensor(tensor, tensor._version)
        if tensor.is_conj() or tensor.is_neg():
            raise NotImplementedError("a view of a parameter that is conjugated or negated as it is read")
        return _Place(memory, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, weights: SavedWeights, place: _Place | _OtherTensor) -> torch.Tensor:
        if isinstance(place, _OtherTensor):
            if place.tensor._version != place.changes:
                # Autograd says so itself of what no hook has place.
                raise RuntimeError("a tensor that the backward needs has been changed in place since it was saved")
            return place.tensor
        whole = self._memories(weights.version)[place.memory]
        return (whole if whole.dtype == place.dtype else whole.view(place.dtype)).as_strided(*place[2:])
