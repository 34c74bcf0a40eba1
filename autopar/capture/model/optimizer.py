"""A user's optimizer: the settings that it gives each parameter, as plain data, and trials of it on small parameters.

Every rank has an optimizer for the parameters of its stages, and not all ranks have any. An optimizer whose step treats
parameters one by one or group by group (SGD, Adam, Adagrad and most others, ``foreach`` and ``fused`` too) does what it
would do with all of them. Groups by name or by shape are good. What depends on the place, the number or the identity of
parameters is refused before the first step, and so is a step that takes all parameters together, such as one that clips
by their norm (``--clip-norm`` does that). One whose step calls for the loss again (L-BFGS) is refused, too. Where
several devices run a replica together, each steps its parts of parameters alone: an optimizer that looks at whole ones
(Muon, Adafactor, LAMB) is refused before the first step.

Trials tell whether it needs all parameters at once, and whether it can step parts of them. A step that takes a norm, or
another statistic, over all parameters does something else on ranks that hold some of them. One that takes it over a
parameter may do something else, or fail, where replicas hold parts of it. Torch has these step them together; ranks
that run a replica together step theirs alone.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from autopar.capture.model.source import ONE_STAGE, NamedParameters, StageTraits, UserModel
from autopar.errors import ModelError, first_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Settings = dict[str, list[dict[str, Any]]]
"""The settings of every parameter in each of the first steps; parameters that no group holds are left out."""

_AHEAD = 8
"""Steps of a scheduler that are looked at."""
_NOT_SETTINGS = {"params", "param_names"}


def settings_of(user: UserModel, named_parameters: NamedParameters, traits: StageTraits = ONE_STAGE) -> Settings:
    """Return what an optimizer of these parameters, made for this purpose alone, gives each of them.

    Args:
        user: whose it is.
        named_parameters: what it is given.
        traits: what it is told of their stage.

    Raises:
        ModelError: ``optimizer()`` or ``scheduler()`` raises.
    """
    optimizer = user.make_optimizer(named_parameters, traits)
    scheduler = user.make_scheduler(optimizer)
    names = {id(parameter): name for name, parameter in named_parameters}
    found: Settings = {}
    _note(found, optimizer, names)
    if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
        for _ in range(_AHEAD):
            try:
                with warnings.catch_warnings():
                    # Nothing has been stepped, and nothing will be.
                    warnings.simplefilter("ignore")
                    scheduler.step()
            except Exception:
                # It has an end, or wants to be told something.
                break
            _note(found, optimizer, names)
    return found


def group_settings(group: Mapping[str, object]) -> dict[str, object]:
    """Return what an optimizer gives a group of parameters, without these."""
    return {str(key): value for key, value in group.items() if key not in _NOT_SETTINGS}


def _note(settings_by_name: Settings, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    for group in optimizer.param_groups:
        settings = {key: _plain(value) for key, value in group_settings(group).items()}
        # As it is read from a file.
        settings = json.loads(json.dumps(settings))
        for parameter in group["params"]:
            if id(parameter) in names:
                settings_by_name.setdefault(names[id(parameter)], []).append(settings)


def _plain(value: object) -> object:
    """Return a value as numbers, texts, lists and dicts; of anything else its name."""
    if isinstance(value, float):
        return repr(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Iterable):
        return [_plain(each) for each in value]
    if hasattr(value, "__qualname__"):
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        known = [_plain(each) for each in cells if isinstance(each, bool | int | float | str)]
        return [f"{getattr(value, '__module__', None)}.{value.__qualname__}", *known]
    return type(value).__qualname__


_STEPS = 4
_MOST = 2
"""How many parameters of each number of dimensions are tried."""
_SIZES = 6, 4, 3
_TOLERANCE = 1e-6
"""Two steps are alike up to this share of how far they move a parameter."""

_Small = list[tuple[str, torch.Tensor]]
_Convert = Callable[[torch.Tensor], torch.Tensor]


def refuse_others(optimizer: torch.optim.Optimizer, given: Iterable[nn.Parameter], user: UserModel) -> None:
    """Refuse an optimizer that steps other parameters than it was made for.

    Raises:
        ModelError: it does; says how many, and what to do.
    """
    known = {id(parameter) for parameter in given}
    others = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in known]
    if others:
        raise ModelError(
            f"{user.path}: optimizer() steps {len(others)} parameters that it was not given, the first of shape "
            f"{tuple(others[0].shape)}: ranks train copies of their own, so make it of its argument alone; where it "
            "goes by names, call the argument named_parameters to be given pairs (name, parameter)"
        )


def needs_all(user: UserModel, named_parameters: NamedParameters) -> str | None:
    """Return why the optimizer moves parameters otherwise together than one by one; None if it does not.

    Large gradients, small ones and some between come in turn, so that what they are together changes from step to step.
    An optimizer that none of this can be tried with is taken for one that does not.
    """
    small = _small(named_parameters)
    gradients = _gradients(small)
    try:
        with _seed_generator() as drawn:
            together = _run_steps(user, small, gradients)
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
            separate = _run_steps(user, [(name, value)], [gradients[place]])
            same = settings_of(user, _parameters([(name, value)])).get(name) == settings.get(name)
        except Exception:
            # It may want some kind of parameter that is not among these.
            continue
        if same and not _equal(value, separate[0], together[place]):
            return "takes all parameters together"
    return None


def sharding_problem(
    user: UserModel,
    named_parameters: NamedParameters,
    divide: _Convert,
    join: _Convert,
    acting: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> str | None:
    """Return why the optimizer cannot step divided parameters; None if it moves them as it moves whole ones.

    Args:
        user: whose optimizer it is.
        named_parameters: the model's trained parameters.
        divide: returns a tensor divided among replicas.
        join: returns the whole of such a one.
        acting: makes the context in which this is done.
    """
    small = _divisible(named_parameters)
    # Made before anything acts: simulated ranks draw numbers of their own.
    gradients = _gradients(small)
    whole = _try_steps(user, small, gradients)

    def moves() -> Iterator[_Move]:
        with _seed_generator(), acting():
            joined = [join(part) for part in _run_steps(user, small, gradients, divide)]
        return zip((value for _, value in small), joined, whole or (), strict=True)

    return None if whole is None else _problem(moves, "where replicas hold parts of parameters")


def splitting_problem(user: UserModel, named_parameters: NamedParameters, place: _Convert = torch.clone) -> str | None:
    """Return why the optimizer cannot step parts of parameters by themselves, as ranks of a team do; None if it can.

    Halves of rows are tried, and halves of columns.

    Args:
        user: whose optimizer it is.
        named_parameters: trained parameters.
        place: brings a tensor to the device where they are.
    """
    small = _divisible(named_parameters)
    gradients = _gradients(small)
    whole = _try_steps(user, small, gradients, _compose(torch.clone, place))

    def moves() -> Iterator[_Move]:
        for take in (partial(_half, dim, half) for dim in range(2) for half in range(2)):
            with _seed_generator():
                halves = _run_steps(user, small, gradients, _compose(take, place))
            for (_, value), half, mine in zip(small, halves, whole or (), strict=True):
                yield take(value), half.cpu(), take(mine.cpu())

    return None if whole is None else _problem(moves, "where ranks have parts of parameters")


_Move = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A tensor before some steps, after them in parts, and after them as a whole."""


def _try_steps(
    user: UserModel, small: _Small, gradients: Sequence[Sequence[torch.Tensor]], convert: _Convert = torch.clone
) -> list[torch.Tensor] | None:
    """Return what :func:`_run_steps` does; None of an optimizer that nothing can be tried with."""
    with suppress(Exception), _seed_generator():
        return _run_steps(user, small, gradients, convert)
    return None


def _problem(moves: Callable[[], Iterable[_Move]], where: str) -> str | None:
    """Return what a step does wrong with parts of parameters, if anything."""
    try:
        alike = all(_equal(*each) for each in moves())
    except Exception as error:
        return f"its step raises {type(error).__name__} {where} ({first_line(error)[:100]})"
    return None if alike else f"its step does something else {where}"


def _compose(first: _Convert, second: _Convert) -> _Convert:
    return lambda tensor: second(first(tensor))


def _half(dim: int, half: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return half of a tensor along a dimension, or its last one; all of it where that has one index."""
    at = min(dim, tensor.dim() - 1)
    return (tensor.chunk(2, at)[half] if tensor.shape[at] > 1 else tensor).clone()


def try_sharding(user: UserModel, named_parameters: NamedParameters) -> str | None:
    """Return :func:`sharding_problem` of two replicas that this process plays; None where it is one of several already.

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
        return sharding_problem(user, named_parameters, divider(mesh), join, lambda: LocalTensorMode(frozenset({0, 1})))
    finally:
        dist.destroy_process_group()


def divider(mesh: DeviceMesh) -> _Convert:
    """Return what divides a tensor's rows among the ranks of a mesh."""
    from torch.distributed.tensor import Shard, distribute_tensor

    return lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])


def _divisible(named_parameters: NamedParameters) -> _Small:
    """Return small tensors in place of parameters that may be divided."""
    return [(name, value) for name, value in _small(named_parameters) if value.dim() and not value.is_complex()]


def _small(named_parameters: NamedParameters) -> _Small:
    """Return a few small tensors in place of parameters, of every number of dimensions; those of one element stay."""
    generator = torch.Generator().manual_seed(0)
    seen: Counter[tuple[int, ...]] = Counter()
    found: _Small = []
    for name, parameter in named_parameters:
        shape = tuple(min(size, _SIZES[at] if at < len(_SIZES) else 2) for at, size in enumerate(parameter.shape))
        kind = (len(shape), int(1 in shape), int(parameter.is_complex()))
        if 0 in shape or seen[kind] == _MOST:
            continue
        seen[kind] += 1
        dtype = torch.complex128 if parameter.is_complex() else torch.float64
        found.append((name, torch.randn(shape, generator=generator, dtype=dtype)))
    return found


def _parameters(small: _Small, convert: _Convert = torch.clone) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(convert(value))) for name, value in small]


def _gradients(small: _Small) -> list[list[torch.Tensor]]:
    """Return the gradients of every tensor, step by step: large ones, small ones, and some between."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            10.0 ** (3 - 3 * ((step + place) % 3)) * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for step in range(_STEPS)
        ]
        for place, (_, value) in enumerate(small)
    ]


def _run_steps(
    user: UserModel, small: _Small, gradients: Sequence[Sequence[torch.Tensor]], convert: _Convert = torch.clone
) -> list[torch.Tensor]:
    """Return the tensors after some steps."""
    named = _parameters(small, convert)
    optimizer = user.make_optimizer(named)
    for step in range(_STEPS):
        for (_, parameter), given in zip(named, gradients, strict=True):
            parameter.grad = convert(given[step])
        optimizer.step()
    return [parameter.detach() for _, parameter in named]


def _equal(begin: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors were moved alike from where they began, but for rounding."""
    far = float((other - begin).abs().max())
    off = float((one - other).abs().max())
    # Where a step makes something that is not finite, it does so whoever takes it.
    return off <= _TOLERANCE * far + 1e-12 * float(other.abs().max()) or not math.isfinite(far)


@contextmanager
def _seed_generator() -> Iterator[Callable[[], bool]]:
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
