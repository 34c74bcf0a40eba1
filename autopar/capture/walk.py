"""Walk: one forward of a model followed call by call, so that it is known which layer of a plan runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from autopar.capture.batch import model_arguments
from autopar.capture.source import UserModel
from autopar.errors import ModelError
from autopar.formats.plan import Plan

Key = tuple[str, int]
"""A call: the module's path, and how often it has been called in this forward, from 1."""


class Walk:
    """Runs forwards, and knows at every call of a module which layer it belongs to.

    A layer begins with the call that it is named after, ``path`` or ``path@2``, and lasts until the next one begins;
    what the model computes before the first such call belongs to the first layer.
    """

    def __init__(self, model: nn.Module, plan: Plan, user: UserModel) -> None:
        """Take the model, the plan that has its layers, and the file that may list its modules.

        Raises:
            ModelError: the model has no module that a layer of the plan is named after.
        """
        self.model, self._has_loss = model, user.loss is not None
        self._elements = None if user.layers is None else list(user.layers(model))
        self._order = [layer for stage in plan.stages for layer in stage.layers]
        self._stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
        self._paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
        for index, element in enumerate(self._elements or []):
            self._paths.setdefault(id(element), f"layers.{index}")
        self._starts = {} if self._elements is not None else self._first_calls(self._order[1:], user)
        self._counts: Counter[str] = Counter()
        self.layer = self._order[0]

    @property
    def stage(self) -> int:
        """The stage of the layer that runs."""
        return self._stage_of[self.layer]

    def forward(self, batch: object) -> object:
        """Run the model, or the modules that its file lists, on a batch; return its output."""
        self._counts.clear()
        self.switch(self._order[0])
        positional, named = model_arguments(self.model, batch, self._has_loss)
        with self._followed():
            if self._elements is None:
                return self.model(*positional, **named)
            return self._one_after_another(self._elements, positional, named)

    def switch(self, layer: str) -> None:
        """Begin a layer."""
        self.layer = layer

    def arrive(self, key: Key) -> None:
        """Begin the layer that a call starts, if it starts one."""
        if key in self._starts:
            self.switch(self._starts[key])

    def around(
        self,
        module: nn.Module,
        key: Key,
        run: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run one call of a module of the model."""
        self.arrive(key)
        return run(module, *arguments, **named)

    def _one_after_another(
        self, elements: Sequence[nn.Module], positional: Sequence[Any], named: dict[str, Any]
    ) -> object:
        output: object = elements[0](*positional, **named)
        for layer, element in zip(self._order[1:], elements[1:], strict=True):
            self.switch(layer)
            output = element(tuple(output) if isinstance(output, list) else output)
        return output

    def _first_calls(self, layers: Sequence[str], user: UserModel) -> dict[Key, str]:
        found: dict[Key, str] = {}
        named = dict(self.model.named_modules(remove_duplicate=False))
        for layer in layers:
            # A layer that joins modules begins with the first that it is named after; a module's own name may have a +.
            parts = layer.split("+")
            calls = [_call("+".join(parts[:count])) for count in range(len(parts), 0, -1)]
            path, count = next((call for call in calls if call[0] in named), calls[-1])
            if path not in named:
                raise ModelError(f"{user.path}: the model has no module {path}, which the plan places")
            canonical = self._paths[id(named[path])]
            while (canonical, count) in found:
                # Two names of one module: its next call.
                count += 1
            found[canonical, count] = layer
        return found

    @contextmanager
    def _followed(self) -> Iterator[None]:
        """Let all calls of the model's modules pass through :meth:`around`."""
        run = nn.Module.__call__

        def call(module: nn.Module, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            path = self._paths.get(id(module))
            if path is None:
                return run(module, *arguments, **named)
            self._counts[path] += 1
            return self.around(module, (path, self._counts[path]), run, arguments, named)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = run  # type: ignore[method-assign]


def _call(unit: str) -> Key:
    """Return the call that is written ``path`` or ``path@2``.

    >>> _call("norm@2"), _call("norm")
    (('norm', 2), ('norm', 1))
    """
    path, _, again = unit.rpartition("@")
    return (path, int(again)) if path and again.isdigit() else (unit, 1)
