"""Hooks: the functions of a model file, how each is called, and what to write where one cannot be called so."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import nn
from torch.utils.data import Dataset

from autopar.errors import ModelError

_MOST_SHOWN = 60
"""Characters of a file that are repeated in what to write instead."""


OneLoss = torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]
Loss = OneLoss | Mapping[str, OneLoss | Mapping[str, OneLoss]]
"""A mean over samples, a sum and a count, or several of either kind by name."""


class ModelFile(Protocol):
    """The functions of a model file: a Python file, or ``package.module:factory``, which imports nothing of autopar.

    ``model`` is required, and so is ``dataset`` to profile and to run; the others have defaults. With a factory, the
    other functions are looked up in the factory's module. The file is executed once in every process, and may import
    what is installed, and files of its folder; what it prints goes to standard error. A function that cannot be called
    as it stands here is refused when the file is loaded, with its line and what to write instead.
    """

    def model(self) -> nn.Module:
        """Return the model, built on the CPU right after ``torch.manual_seed(seed)``.

        ``model = Net`` will do where the class takes no arguments, and so will ``functools.partial``. ``model = Net()``
        will not: its weights would be drawn before they are seeded. Parameters are all float32 or complex64, or all
        float64 or complex128. Complex numbers of double precision are saved as pairs of real ones, as safetensors
        knows them; ``torch.view_as_complex`` makes them what they were. The model is trained in training mode.
        """
        ...

    def dataset(self) -> Dataset[Any]:
        """Return a map-style dataset: it has ``__len__`` and ``__getitem__``; a list of samples is one.

        Samples may be drawn at random, on the default generators of Python, NumPy and torch: they are seeded by the
        run's seed, the epoch and the sample's index before a sample is read.
        """
        ...

    def evaluation_dataset(self) -> Dataset[Any]:
        """Return the map-style dataset whose loss ``--eval-every`` computes between steps, in evaluation mode.

        Default: none, and nothing is evaluated.
        """
        ...

    def loss(self, output: Any, batch: Any) -> Loss:  # noqa: ANN401
        """Return the loss of a batch: a mean over samples, or ``(sum, count)``, or several of these by name.

        ``batch`` is the whole batch as ``collate`` makes it, and ``output`` anything that the model returns. Default:
        the model's output is a scalar, or carries ``.loss`` or ``["loss"]``. Where samples have unevenly many of what
        is averaged, such as labelled tokens, return the sum and the count. A parameter that the loss does not lead back
        to has no gradient, as in plain training: an optimizer with weight decay would shrink it for a gradient of zero.

            def loss(output, batch):
                scores, labels = output.flatten(0, 1), batch["labels"].flatten()
                return F.cross_entropy(scores, labels, reduction="sum"), (batch["labels"] != -100).sum()

        A mapping's terms are added up, each sum divided by its own count over the whole mini-batch, whatever
        micro-batches and replicas have of it; a term of which nothing is counted adds 0. Counts of a mapping are
        computed of the batch alone. Figures under ``log`` have no part in the loss. ``job.step(batch).losses`` and
        reports give all by name.

            def loss(output, batch):
                words = F.cross_entropy(output.words.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
                pairs = F.cross_entropy(output.pairs, batch["is_next"])
                right = (output.pairs.argmax(1) == batch["is_next"]).float().mean()
                return {"words": (words, (batch["labels"] != -100).sum()), "pairs": pairs, "log": {"right": right}}
        """
        ...

    def optimizer(self, parameters: Iterable[nn.Parameter], *, delay: float, replicas: int) -> torch.optim.Optimizer:
        """Return an optimizer of some parameters. Default: ``torch.optim.AdamW(parameters, lr=1e-3)``.

        Every rank makes one, for the parameters of its stages. Call the argument ``named_parameters`` to be given pairs
        with the model's own names, and make groups by name:

            def optimizer(named_parameters):
                pairs = list(named_parameters)  # ("blocks.0.linear.weight", parameter), ...
                decayed = [each for name, each in pairs if name.endswith("weight")]
                others = [each for name, each in pairs if not name.endswith("weight")]
                return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3)

        ``delay`` and ``replicas`` are passed only if you have parameters of these names.
        """
        ...

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Return a scheduler of rates, stepped once a step; ``ReduceLROnPlateau`` with the mini-batch's loss.

        Default: none.
        """
        ...

    def collate(self, samples: list[Any]) -> Any:  # noqa: ANN401
        """Return a batch of samples. Default: ``torch.utils.data.default_collate``.

        One of your own is given all samples of a micro-batch on every rank that reads from it, which costs every
        replica the loading of the whole. Sizes other than the number of samples are fixed, so this is where you pad.
        """
        ...

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """Return modules that are called one after another, where the model cannot be captured. Default: capture.

        If the function is there, it is used.
        """
        ...


IGNORED_STATE = """A list of paths of Python state that forwards change and that you only log, such as
``["Net.calls"]``. Default: none. See "Python state"."""

WHOLE_BATCHES = """``True``: ``collate`` is given the samples of a whole mini-batch, of which each rank then takes its
rows, as a training script does; every rank that reads inputs reads all samples. Default: it is given those of one
micro-batch, and must make of a sample what does not depend on the others."""


class Hook(NamedTuple):
    """A function of the model file."""

    parameters: tuple[str, ...]
    """What it is given, in order."""
    body: str
    """What it may return."""
    argument_text: str
    """What it is given, in words."""
    options: tuple[str, ...]
    """What it is given by name, if it asks for it."""

    def call(self, name: str) -> str:
        return f"{name}({', '.join(self.parameters)})"

    def definition(self, name: str, body: str = "") -> str:
        return f"`def {self.call(name)}: return {body or self.body}`"


def _hook(name: str, body: str, argument_text: str = "nothing") -> Hook:
    """Return a function of :class:`ModelFile`; what it is given by name alone is optional."""
    _, *parameters = inspect.signature(getattr(ModelFile, name)).parameters.values()
    optional = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    required = [each.name for each in parameters if each.name not in optional]
    return Hook(tuple(required), body, argument_text, tuple(optional))


HOOKS = {
    "model": _hook("model", "Net()"),
    "dataset": _hook("dataset", "torch.utils.data.TensorDataset(inputs, targets)"),
    "evaluation_dataset": _hook("evaluation_dataset", "torch.utils.data.TensorDataset(inputs, targets)"),
    "loss": _hook(
        "loss",
        "torch.nn.functional.cross_entropy(output, batch[1])",
        "the model's output and the whole batch, as collate makes it",
    ),
    "optimizer": _hook("optimizer", "torch.optim.AdamW(parameters, lr=1e-3)", "a list of parameters"),
    "scheduler": _hook("scheduler", "torch.optim.lr_scheduler.StepLR(optimizer, 100)", "the optimizer"),
    "collate": _hook("collate", "torch.utils.data.default_collate(samples)", "a list of samples"),
    "layers": _hook("layers", "[model.embedding, *model.blocks, model.head]", "the model"),
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


def parameters_of(value: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function; none of some built-in ones, of which nobody knows."""
    try:
        return list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return []


def options_of(value: Callable[..., Any], hook: Hook) -> tuple[str, ...]:
    """Return the hook's options that a function asks for: it has parameters of these names, which are not bound.

    >>> options_of(lambda parameters, delay: None, HOOKS["optimizer"])
    ('delay',)
    >>> options_of(functools.partial(lambda parameters, delay: None, delay=3), HOOKS["optimizer"])
    ()
    """
    parameters = parameters_of(value)
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


_MISSPELLED = 0.85
"""Of 1 for the same letters, how alike the names of two functions are of which one was meant for the other."""


def refuse_misspelled(path: Path, module: ModuleType) -> None:
    """Refuse a file with a function that nothing calls, since its name is not quite that of one which is not there.

    Raises:
        ModelError: names the function, its line, and what it should be called.
    """
    absent = [name for name in HOOKS if not hasattr(module, name)]
    for name, value in vars(module).items():
        if name in HOOKS or name[0] == "_" or not inspect.isfunction(value) or value.__module__ != module.__name__:
            continue
        for meant in get_close_matches(name, absent, n=1, cutoff=_MISSPELLED):
            if not unlike(value, HOOKS[meant].parameters):
                line = value.__code__.co_firstlineno
                raise ModelError(
                    f"{path}:{line}: nothing calls {name}(); did you mean {meant}()? Rename it, or call it _{name}()"
                )


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
                return each.lineno, text if len(text) <= _MOST_SHOWN else ""
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
