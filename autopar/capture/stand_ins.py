"""Stand-ins: modules of a model that is larger than memory, run for what they return.

Parameters are fake tensors, which compute nothing. Where shapes do not tell what a module returns, since values decide
what it runs, that module alone is given random weights, and run on random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.effects import draws
from autopar.capture.hollow import faked, without_fakes
from autopar.capture.place import usual_values
from autopar.capture.traps import general_masks


class StandIns:
    """Runs modules whose parameters have no values; see :func:`standing_in`."""

    def __init__(self, mode: FakeTensorMode, names: Mapping[int, str]) -> None:
        self._mode, self._names = mode, names

    def run(
        self, module: nn.Module, compute: Callable[[tuple[torch.Tensor, ...]], object], inputs: Sequence[torch.Tensor]
    ) -> tuple[object, bool]:
        """Return what ``compute``, which runs ``module`` and no other with parameters, gives; and whether it draws.

        Tensors of the result are fake, those among the inputs may be. Integers that were fake are zeros where values
        decide. What the module raises is what it raises with values.
        """
        try:
            with self._mode, _Draws() as drawn:  # type: ignore[no-untyped-call]
                found = _each(compute(tuple(map(self._fake, inputs))), _sized)
            return found, drawn.found
        except Exception:
            # Values decide; or the module is mistaken, which it then is with values too.
            before = torch.get_rng_state()
            with self._valued(module):
                found = compute(tuple(map(_drawn, inputs)))
            return _each(found, self._fake), not torch.equal(before, torch.get_rng_state())

    def observe(self, call: Callable[[Sequence[torch.Tensor]], None], inputs: Sequence[torch.Tensor]) -> None:
        """Run the whole model by ``call`` on fake tensors.

        Raises:
            Exception: what the model raises on them.
        """
        with self._mode:
            call([self._fake(tensor) for tensor in inputs])

    def observe_in_turn(self, call: Callable[[], None], modules: Sequence[nn.Module]) -> None:
        """Run the whole model by ``call`` with values, of which each of ``modules`` has some while it runs."""
        giving: dict[nn.Module, contextlib.ExitStack] = {}

        def give(module: nn.Module, *_: object) -> None:
            giving[module] = contextlib.ExitStack()
            giving[module].enter_context(self._valued(module))

        handles = [module.register_forward_pre_hook(give, prepend=True) for module in modules]
        handles += [module.register_forward_hook(lambda module, *_: giving.pop(module).close()) for module in modules]
        try:
            # A tape would hold every module's values to the end.
            with torch.no_grad():
                call()
        finally:
            for stack in giving.values():
                stack.close()
            for handle in handles:
                handle.remove()

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self._mode.from_tensor(tensor.detach(), static_shapes=True)
        return fake.requires_grad_(tensor.requires_grad)

    @contextlib.contextmanager
    def _valued(self, module: nn.Module) -> Iterator[None]:
        """Give one module's parameters values of the usual scale in the block."""
        held = [(part, name, value) for part in module.modules() for name, value in part._parameters.items()]
        made: dict[int, nn.Parameter] = {}
        try:
            for part, name, value in held:
                if value is not None:
                    if id(value) not in made:
                        values = usual_values(value, self._names.get(id(value), name))
                        made[id(value)] = nn.Parameter(values, requires_grad=value.requires_grad)
                    part._parameters[name] = made[id(value)]
            yield
        finally:
            for part, name, value in held:
                part._parameters[name] = value


@contextlib.contextmanager
def standing_in(model: nn.Module, modules: Sequence[nn.Module] = ()) -> Iterator[StandIns]:
    """Let parameters that have shapes but no values pass for tensors on the CPU inside the block.

    Args:
        model: whose parameters have no values.
        modules: other modules that hold them.
    """
    everything = nn.ModuleList([model, *modules])
    with faked(everything) as mode, without_fakes(everything), general_masks():
        yield StandIns(mode, {id(value): name for name, value in model.named_parameters()})


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator draws random numbers: fake ones leave the generator's state alone."""

    found = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        named = kwargs or {}
        self.found = self.found or (isinstance(func, torch._ops.OpOverload) and draws(func, args, named))
        return func(*args, **named)


def _drawn(tensor: torch.Tensor) -> torch.Tensor:
    """Return random numbers, or zeros of an integer type, for a tensor without values; another one as it is."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    value = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
    if value.is_floating_point():
        value.normal_(generator=torch.Generator().manual_seed(0))
    return value.requires_grad_(tensor.requires_grad)


def _sized(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor.

    Raises:
        ValueError: its size is decided by values.
    """
    if not all(type(size) is int for size in tensor.shape):
        raise ValueError(f"sizes {tuple(tensor.shape)} depend on values")
    return tensor


def _each(output: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    if isinstance(output, (tuple, list)):
        return tuple(_each(item, change) for item in output)
    return change(output) if isinstance(output, torch.Tensor) else output
