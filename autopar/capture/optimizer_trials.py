"""Trials of a user's optimizer on small parameters: does it need all of them at once, and can it step parts of them.

A step that takes a norm, or another statistic, over all parameters does something else on ranks that hold some of them.
One that takes it over a parameter may do something else, or fail, where replicas hold parts of it.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from autopar.capture.optimizer_settings import settings_of
from autopar.capture.source import NamedParameters, UserModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STEPS = 4
MOST = 2
"""Parameters of a number of dimensions that are tried."""
SIZES = 6, 4, 3
TOLERANCE = 1e-6
"""Of how far a parameter is moved; rounding is a billionth of that."""

Small = list[tuple[str, torch.Tensor]]
Convert = Callable[[torch.Tensor], torch.Tensor]


def needs_all(user: UserModel, named: NamedParameters) -> str | None:
    """Return why the optimizer moves parameters otherwise together than one by one; None if it does not.

    Large gradients, small ones and some between come in turn, so that what they are together changes from step to step.
    An optimizer that none of this can be tried with is taken for one that does not.
    """
    small = _small(named)
    gradients = _gradients(small)
    try:
        with _seeded() as drawn:
            together = _moved(user, small, gradients)
            random = drawn()
        if random:
            return "draws random numbers for one parameter after the other"
        if len(small) < 2:
            return None
        settings = settings_of(user, _parameters(small))
    except Exception:
        return None
    for place, (name, value) in enumerate(small):
        try:
            alone = _moved(user, [(name, value)], [gradients[place]])
            same = settings_of(user, _parameters([(name, value)])).get(name) == settings.get(name)
        except Exception:
            # It may want some kind of parameter that is not among these.
            continue
        if same and not _equal(value, alone[0], together[place]):
            return "takes all parameters together"
    return None


def divided_trouble(
    user: UserModel,
    named: NamedParameters,
    divide: Convert,
    join: Convert,
    acting: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> str | None:
    """Return why the optimizer cannot step divided parameters; None if it moves them as it moves whole ones.

    Args:
        user: whose optimizer it is.
        named: the model's trained parameters.
        divide: returns a tensor divided among replicas.
        join: returns the whole of such a one.
        acting: makes the context in which this is done.
    """
    small = [(name, value) for name, value in _small(named) if value.dim() and not value.is_complex()]
    # Made before anything acts: simulated ranks draw numbers of their own.
    gradients = _gradients(small)
    try:
        with _seeded():
            whole = _moved(user, small, gradients)
    except Exception:
        # Nothing can be tried with it.
        return None
    try:
        with _seeded(), acting():
            parts = _moved(user, small, gradients, divide)
            joined = [join(part) for part in parts]
    except Exception as error:
        said = (str(error).strip().splitlines() or ["no message"])[0]
        return f"its step raises {type(error).__name__} where replicas hold parts of parameters ({said[:100]})"
    for (_, value), expected, found in zip(small, whole, joined, strict=True):
        if not _equal(value, found, expected):
            return "its step does something else where replicas hold parts of parameters"
    return None


def tried_divided(user: UserModel, named: NamedParameters) -> str | None:
    """Return :func:`divided_trouble` of two replicas that this process plays; None where it is one of several already.

    The replicas are those of torch's simulated ranks, which share nothing but what a collective gives them.
    """
    import torch.distributed as dist

    if not dist.is_available() or dist.is_initialized():
        return None
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def join(tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, DTensor)
        full = tensor.full_tensor()
        return full.reconcile() if isinstance(full, LocalTensor) else full

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        return divided_trouble(user, named, divider(mesh), join, lambda: LocalTensorMode(frozenset({0, 1})))
    finally:
        dist.destroy_process_group()


def divider(mesh: DeviceMesh) -> Convert:
    """Return what divides a tensor's rows among the ranks of a mesh."""
    from torch.distributed.tensor import Shard, distribute_tensor

    return lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])


def _small(named: NamedParameters) -> Small:
    """Return a few small tensors in place of a model's parameters, of every number of dimensions that they have.

    Dimensions of one element stay.
    """
    generator = torch.Generator().manual_seed(0)
    seen: Counter[tuple[int, ...]] = Counter()
    found: Small = []
    for name, parameter in named:
        shape = tuple(min(size, SIZES[at] if at < len(SIZES) else 2) for at, size in enumerate(parameter.shape))
        kind = (len(shape), int(1 in shape), int(parameter.is_complex()))
        if 0 in shape or seen[kind] == MOST:
            continue
        seen[kind] += 1
        dtype = torch.complex128 if parameter.is_complex() else torch.float64
        found.append((name, torch.randn(shape, generator=generator, dtype=dtype)))
    return found


def _parameters(small: Small, convert: Convert = torch.clone) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(convert(value))) for name, value in small]


def _gradients(small: Small) -> list[list[torch.Tensor]]:
    """Return the gradients of every tensor, step by step: large ones, small ones, and some between."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            10.0 ** (3 - 3 * ((step + place) % 3)) * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for step in range(STEPS)
        ]
        for place, (_, value) in enumerate(small)
    ]


def _moved(
    user: UserModel, small: Small, gradients: Sequence[Sequence[torch.Tensor]], convert: Convert = torch.clone
) -> list[torch.Tensor]:
    """Return the tensors after some steps."""
    named = _parameters(small, convert)
    optimizer = user.make_optimizer(named)
    for step in range(STEPS):
        for (_, parameter), given in zip(named, gradients, strict=True):
            parameter.grad = convert(given[step])
        optimizer.step()
    return [parameter.detach() for _, parameter in named]


def _equal(begin: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors were moved alike from where they began, but for rounding."""
    far = float((other - begin).abs().max())
    off = float((one - other).abs().max())
    # Where a step makes something that is not finite, it does so whoever takes it.
    return off <= TOLERANCE * far + 1e-12 * float(other.abs().max()) or not math.isfinite(far)


@contextmanager
def _seeded() -> Iterator[Callable[[], bool]]:
    """Seed the generator of random numbers, and put it back; give what tells whether any were drawn."""
    before = torch.get_rng_state()
    torch.manual_seed(0)
    begun = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield lambda: not torch.equal(torch.get_rng_state(), begun)
    finally:
        torch.set_rng_state(before)
