"""Hooks: the functions of a model file, how each is called, and what to write where one cannot be called so."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

from torch import nn

from autopar.errors import ModelError

MOST_SHOWN = 60
"""Characters of a file that are repeated in what to write instead."""


class Hook(NamedTuple):
    """A function of the model file."""

    parameters: tuple[str, ...]
    """What it is given, in order."""
    body: str
    """What it may return."""
    argument_text: str = "nothing"
    """What it is given, in words."""
    options: tuple[str, ...] = ()
    """What it is given by name, if it asks for it."""

    def call(self, name: str) -> str:
        return f"{name}({', '.join(self.parameters)})"

    def definition(self, name: str, body: str = "") -> str:
        return f"`def {self.call(name)}: return {body or self.body}`"


HOOKS = {
    "model": Hook((), "Net()"),
    "dataset": Hook((), "TensorDataset(inputs, targets)"),
    "loss": Hook(
        ("output", "batch"),
        "nn.functional.cross_entropy(output, batch[1])",
        "the model's output and the whole batch, as collate makes it",
    ),
    "optimizer": Hook(
        ("parameters",), "torch.optim.AdamW(parameters, lr=1e-3)", "a list of parameters", ("delay", "replicas")
    ),
    "scheduler": Hook(("optimizer",), "torch.optim.lr_scheduler.StepLR(optimizer, 100)", "the optimizer"),
    "collate": Hook(("samples",), "torch.utils.data.default_collate(samples)", "a list of samples"),
    "layers": Hook(("model",), "[model.embedding, *model.blocks, model.head]", "the model"),
}
LOSS = HOOKS["loss"].definition("loss")


def given_to(name: str) -> str:
    """Return a remedy for a hook that raised as if it had been given something else; empty of others."""
    hook = HOOKS.get(name)
    return f"; {hook.call(name)} is given {hook.argument_text}" if hook is not None and hook.parameters else ""


def check_hook(path: Path, source: bytes, name: str, value: object, hook: Hook) -> Callable[..., Any]:
    """Return what a model file has under a hook's name, if it can be called as the hook is.

    Raises:
        ModelError: it cannot; names the line, and what to write instead.
    """
    at, assigned = _last_binding(source, name)
    place = f"{path}:{at}" if at else str(path)
    if isinstance(value, nn.Module) and not hook.parameters:
        built = assigned or f"{type(value).__name__}(...)"
        raise ModelError(
            f"{place}: {name} is a module, {a(value)}, and not a function that builds one; write "
            f"{hook.definition(name, built)}"
        )
    if not callable(value):
        raise ModelError(f"{place}: {name} is {a(value)}; it must be a function: write {_instead(hook, name, value)}")
    if inspect.iscoroutinefunction(value):
        raise ModelError(f"{place}: {name} is an async function; write `def {hook.call(name)}:` without async")
    if name == "loss" and _is_module_class(value):
        raise ModelError(f"{place}: loss is {a(value)}, which takes no outputs; write {LOSS}")
    wrong = unlike(value, hook.parameters, dict.fromkeys(options_of(value, hook)))
    if wrong:
        raise ModelError(
            f"{place}: {_signature_text(name, value)} is called as {hook.call(name)}: {wrong}; "
            f"{_fix(hook, name, value)}"
        )
    return value


def options_of(value: Callable[..., Any], hook: Hook) -> tuple[str, ...]:
    """Return the hook's options that a function asks for: it has parameters of these names, which are not bound.

    >>> options_of(lambda parameters, delay: None, HOOKS["optimizer"])
    ('delay',)
    >>> options_of(functools.partial(lambda parameters, delay: None, delay=3), HOOKS["optimizer"])
    ()
    """
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        # Of some built-in functions nobody knows.
        return ()
    bound = value.keywords if isinstance(value, functools.partial) else {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # Those before are given by place.
    others = {each.name for at, each in enumerate(parameters) if each.kind in named and at >= _by_place(hook, each)}
    return tuple(each for each in hook.options if each in others and each not in bound)


def _by_place(hook: Hook, parameter: inspect.Parameter) -> int:
    """Return how many parameters are given by place before one that is given by name."""
    return 0 if parameter.kind is inspect.Parameter.KEYWORD_ONLY else len(hook.parameters)


def missing_model(path: Path, name: str, module: ModuleType) -> ModelError:
    """Return the error that a model file does not define its model, with what it has in its place."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    makers = [value for value in own if inspect.isfunction(value) and "model" in value.__name__.lower()]
    nets = [value for value in own if _is_module_class(value)]
    remedy = "add a function that returns a torch.nn.Module"
    maker = next((each for each in makers if not unlike(each, ())), None)
    if maker is not None:
        remedy += f": write `{name} = {maker.__name__}`"
    elif nets:
        remedy += f": write {HOOKS['model'].definition(name, _construction(nets[-1]))}"
    return ModelError(f"{path}: defines no {name}(); {remedy}")


def a(value: object) -> str:
    """Return what a value is, in words.

    >>> a(None), a(3), a(int)
    ('None', 'a int', 'the class int')
    """
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    return "None" if value is None else f"a {type(value).__name__}"


def _is_module_class(value: object) -> TypeGuard[type[nn.Module]]:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def unlike(value: Callable[..., Any], arguments: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> str:
    """Return why something cannot be called with arguments; empty where it can, or its parameters are not known.

    >>> unlike(lambda output: output, ("output", "batch"))
    'too many positional arguments'
    """
    try:
        signature = inspect.signature(value.forward if isinstance(value, nn.Module) else value)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*arguments, **(kwargs or {}))
    except TypeError as error:
        return str(error)
    return ""


def _signature_text(name: str, value: Callable[..., Any]) -> str:
    if inspect.isclass(value):
        return f"{name}, the class {value.__name__},"
    shown = value.forward if isinstance(value, nn.Module) else value
    signature = inspect.signature(shown)
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)}"


def _fix(hook: Hook, name: str, value: Callable[..., Any]) -> str:
    if hook.parameters:
        return f"write {hook.definition(name)}"
    if inspect.isclass(value):
        return f"write {hook.definition(name, _construction(value))}"
    needed = ", ".join(_required_parameters(value))
    return f"give {needed} a default, or write `def {name}():` and set {needed} inside"


def _construction(kind: type) -> str:
    """Return how a class may be called, with what it needs."""
    return f"{kind.__name__}({', '.join(f'{each}=...' for each in _required_parameters(kind))})"


def _required_parameters(value: Callable[..., Any]) -> Iterator[str]:
    """Yield the parameters that have no default."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for each in inspect.signature(value).parameters.values():
        if each.default is inspect.Parameter.empty and each.kind not in variadic:
            yield each.name


def _instead(hook: Hook, name: str, value: object) -> str:
    """Return the function to write in place of something that was made once."""
    kind = type(value)
    if kind.__module__ in ("builtins", "types"):
        return hook.definition(name)
    return hook.definition(name, f"{kind.__name__}({', '.join((*hook.parameters, '...'))})")


def _last_binding(source: bytes, name: str) -> tuple[int, str]:
    """Return the line in which a file binds a name last, and what it assigns if that is short; 0 where it does not."""
    try:
        statements = list(_statements(ast.parse(source)))
    except (SyntaxError, ValueError):
        return 0, ""
    for each in reversed(statements):
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if each.name == name:
                return each.lineno, ""
        elif isinstance(each, (ast.Assign, ast.AnnAssign)):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                text = "" if each.value is None else ast.unparse(each.value)
                return each.lineno, text if len(text) <= MOST_SHOWN else ""
        elif isinstance(each, (ast.Import, ast.ImportFrom)) and any((i.asname or i.name) == name for i in each.names):
            return each.lineno, ""
    return 0, ""


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that run when a file does, in order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            yield from _statements(child)
