"""The user's model file: loaded once, its functions found, its mistakes named by file and line.

Before any of it runs, the files that it is made of are found and hashed: the imports of a file are read from its text,
and followed as far as they lead to files below the same folder. What is imported by a name that only running the code
shows is not seen, nor is what a file reads.

What was hashed is what runs. Neither ``__pycache__`` nor an extension stands in for a text; an extension that has none
is hashed. Imports find what is installed first: a ``json.py`` of yours is refused by name where your model imports
``json``, and never runs where it does not. The folder's other files are there for imports of the model's own files, in
functions, too, and not for those of libraries. What lies elsewhere has to be installed, or on ``PYTHONPATH``.

Its ``optimizer`` is told of the stage whose parameters it steps what it asks for by name. PipeDream multiplies a
stage's rate by its replicas, PipeMare divides it by its delay; the function may do either, or anything else:

    def optimizer(parameters, delay, replicas):
        return torch.optim.SGD(parameters, lr=0.1 * replicas / (1 + delay))

- ``delay``: the updates between a micro-batch's forward and its own update, the mean over a mini-batch, such as 0.5; 0
  with flushes, and where a profile is made. Under ``vertical-sync`` the weights that forwards see may be older.
- ``replicas``: of the stage; 1 where a profile is made.

Training is then of the plan: one with other stages trains otherwise, with flushes, too. A checkpoint that goes on under
such a plan says that the optimizer has changed (``--accept-changes``). ``autopar verify``, and the settings that ranks
are held to, have each parameter's optimizer told of its stage. Stages that share a parameter and would be told
different things are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, default_collate

from autopar.capture.model.effects import user_line, users_error
from autopar.capture.model.hooks import (
    HOOKS,
    a,
    check_hook,
    given_to,
    missing_model,
    options_of,
    parameters_of,
    refuse_misspelled,
)
from autopar.capture.model.huggingface import PREFIX, SYNTHETIC, read_configured
from autopar.capture.model.meta import parameters_on_meta
from autopar.code import Code, check_code, code_of_file, code_of_module
from autopar.errors import AutoparError, CaptureError, ModelError, UsageError, text_of, unknown
from autopar.formats.plan import Plan
from autopar.formats.profile import Joins, ModelSource, path_of
from autopar.importer import use


class StageTraits(NamedTuple):
    """What an optimizer may be told of a stage; by default, of the only one of a pipeline with flushes."""

    delay: float = 0.0
    """Mean over a mini-batch of the updates between a micro-batch's forward and its own update; 0 with flushes."""
    replicas: int = 1
    """Of the stage."""


ONE_STAGE = StageTraits()
"""The only stage there is."""
NamedParameters = Sequence[tuple[str, nn.Parameter]]
"""Parameters with the model's own names."""


def check_shapes(model: nn.Module, place: str) -> None:
    """Refuse a model of modules that find out the shapes of what they hold in a forward, as torch's lazy ones do."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{place}: the shape of {name} is not known before a forward; give its module all sizes, or run the "
                "model on a sample where it is built"
            )


@dataclass(frozen=True)
class UserModel:
    """What a model file defines, with the defaults filled in."""

    spec: str
    """As the user wrote it: a path, or ``package.module:factory``."""
    path: Path
    """The source file."""
    sha256: str
    """Of the source file's bytes."""
    factory: Callable[[], object]
    functions: dict[str, Callable[..., Any]]
    data: Path | None = None
    """The file whose functions feed a model that is built from a configuration."""
    notes: tuple[str, ...] = ()
    """What a reader of a profile must know about the model and its inputs."""
    ignored_state: tuple[str, ...] = ()
    """Paths of Python state that forwards may change, since it is only logged."""
    whole_batches: bool = False
    """Whether ``collate`` is given whole mini-batches, and not micro-batches."""
    keeps_modes: bool = False
    """Whether modules stay in evaluation mode where only some are: a script's model, which is as the script has it."""
    sequence: int | None = None
    """Tokens of a synthetic sample of an ``hf:`` model; none where samples are no sequences, or not synthetic."""
    counts_labels: bool = False
    """Whether ``loss`` counts the labels of a Transformers model that is given from Python."""
    imports: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the user's own files that the source file is made of beside itself; see :class:`ModelSource`."""
    joins: Joins = "reader"
    """Which layers joins belong to; see :class:`ModelSource`."""

    def build(self, seed: int = 0, on_meta: bool = False) -> nn.Module:
        """Build the model on the CPU right after ``torch.manual_seed(seed)``, so equal seeds give equal weights.

        With ``on_meta``, parameters are shapes on the meta device, and at no time more than one of them is held; its
        buffers have their values.

        Raises:
            ModelError: ``model()`` raises, or returns something else than a module.
            CaptureError: a model without values cannot be built, since the constructor reads values of parameters.
        """
        torch.manual_seed(seed)
        built = self._build_on_meta() if on_meta else self._call("model", self.factory)
        if not isinstance(built, nn.Module):
            end = "it must return a torch.nn.Module"
            if built is None or inspect.isclass(built):
                end += f": write `return {built.__name__ if built else 'Net'}()`"
            raise ModelError(f"{self.path}: model() returned {a(built)}; {end}")
        check_shapes(built, str(self.path))
        return built

    def _build_on_meta(self) -> object:
        try:
            with parameters_on_meta():
                return self._call("model", self.factory)
        except ModelError as error:
            if "meta" not in text_of(error.__cause__ or error).lower():
                raise
            line, source = user_line(error.__cause__.__traceback__ if error.__cause__ else None)
            raise CaptureError(
                f"{line}: `{source}` reads the value of a parameter, and a model that is larger than memory is built "
                "without values; compute it of other values"
            ) from error

    def dataset(self, name: str = "dataset") -> Dataset[Any]:
        """Return the map-style dataset that ``dataset()`` gives, or the function of another name.

        Raises:
            ModelError: there is no such function, it raises, or what it returns has no length or no items.
        """
        if name not in self.functions:
            where = self._file_of(name)
            if where.suffix != ".py":
                raise ModelError(
                    f"{self.spec}: has no {name}(); profile it with `data`, a Python file that defines one beside its "
                    "dataset()"
                )
            raise ModelError(
                f"{where}: defines no {name}(); add a function that returns a map-style dataset: write "
                f"{HOOKS[name].definition(name)}"
            )
        found = self._call(name, self.functions[name])
        if not hasattr(found, "__len__") or not hasattr(found, "__getitem__"):
            raise ModelError(
                f"{self._file_of(name)}: {name}() returned {a(found)}; it needs __len__ and __getitem__: return "
                "a list of samples, or a torch.utils.data.Dataset"
            )
        return cast("Dataset[Any]", found)

    def sample_count(self, dataset: Dataset[Any]) -> int:
        return int(self._call("len(dataset())", len, dataset))

    @property
    def model_source(self) -> ModelSource:
        """What a profile says of the model's code."""
        return ModelSource(
            source=self.spec, sha256=self.sha256, sequence=self.sequence, imports=self.imports, joins=self.joins
        )

    @property
    def loss(self) -> Callable[..., Any] | None:
        """``loss(output, batch)``, or none: then the model's output carries the loss."""
        return self.functions.get("loss")

    @property
    def layers(self) -> Callable[..., Any] | None:
        """``layers(model)``, the fallback for a model that cannot be captured."""
        return self.functions.get("layers")

    @property
    def optimizer_options(self) -> tuple[str, ...]:
        """What ``optimizer`` asks to be told of the stage whose parameters it is given."""
        return options_of(self.functions["optimizer"], HOOKS["optimizer"]) if "optimizer" in self.functions else ()

    def make_optimizer(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], traits: StageTraits = ONE_STAGE
    ) -> torch.optim.Optimizer:
        """Return ``optimizer(parameters)``; a file without one gets ``torch.optim.AdamW(parameters, lr=1e-3)``.

        A function whose argument is called ``named_parameters`` is given pairs, with the model's own names; one that
        has parameters called like the ``traits`` of the stage is told these.
        """
        pairs = list(named_parameters)
        parameters = [parameter for _, parameter in pairs]
        if "optimizer" not in self.functions:
            return torch.optim.AdamW(parameters, lr=1e-3)
        function = self.functions["optimizer"]
        options = {name: getattr(traits, name) for name in self.optimizer_options}
        wants_names = any(each.name == "named_parameters" for each in parameters_of(function))
        try:
            made = self._call("optimizer", partial(function, **options), pairs if wants_names else parameters)
        except ModelError as error:
            if not parameters or text_of(error.__cause__ or error) != _NONE_CHOSEN:
                raise
            # It picks some of the model's, of which there are none here.
            made = torch.optim.AdamW([{"params": list[nn.Parameter]()}], lr=1e-3)
        if not isinstance(made, torch.optim.Optimizer):
            raise ModelError(
                f"{self._file_of('optimizer')}: optimizer() returned {a(made)}; it must return a torch.optim.Optimizer"
            )
        return made

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return ``scheduler(optimizer)``, or none if the file has none."""
        if "scheduler" not in self.functions:
            return None
        made = self._call("scheduler", self.functions["scheduler"], optimizer)
        if not isinstance(made, torch.optim.lr_scheduler.LRScheduler):
            raise ModelError(
                f"{self._file_of('scheduler')}: scheduler() returned {a(made)}; it must return a torch LRScheduler"
            )
        return made

    @property
    def schedules(self) -> bool:
        """Whether the file has a scheduler."""
        return "scheduler" in self.functions

    @property
    def collates(self) -> bool:
        """Whether the file has a ``collate`` of its own, which may do other things than stacking samples."""
        return "collate" in self.functions

    def collate(self, samples: Sequence[Any]) -> object:
        """Make a batch of samples with ``collate(samples)``; a file without one gets torch's ``default_collate``."""
        return self._call("collate", self.functions.get("collate", default_collate), list(samples))

    def load_batch(self, dataset: Dataset[Any], indices: Sequence[int]) -> object:
        """Read the samples at ``indices`` and collate them."""
        return self.collate([self.sample(dataset, index) for index in indices])

    def sample(self, dataset: Dataset[Any], index: int) -> object:
        return self._call(f"dataset()[{index}]", dataset.__getitem__, index)

    def _call(self, name: str, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        with user_code(self._file_of(name), name, given_to(name)):
            return function(*arguments)

    def _file_of(self, name: str) -> Path:
        return self.path if self.data is None or name == "model" else self.data


def load(
    spec: str, data: str | Path | None = None, expected_source: ModelSource | None = None, sequence: int | None = None
) -> UserModel:
    """Load a model file (``path/to/model.py``), a factory (``package.module:factory``) or a configuration (``hf:...``).

    The file is executed once, under a name of its own, with its standard output sent to standard error; the files of
    its folder can be imported behind installed packages (:mod:`autopar.importer`). With a factory, ``dataset``,
    ``loss`` and so on are looked up in the factory's module. A model of the Transformers library is built from its
    configuration (a file, or a folder with a ``config.json``) and fed with synthetic inputs, or with those of ``data``,
    a Python file with ``dataset``, or any other function of a model file. Where a profile or plan says by
    ``expected_source`` what the code was, nothing of it runs that is not the same, synthetic inputs are as long, and
    layers are cut by the same rule; ``sequence`` asks for their tokens in place of what the configuration says.

    Raises:
        FileError: the code is not what was recorded; names the file that has changed.
        UsageError: the spec is of a kind that autopar does not read, or has no such sequences.
        ModelError: the file is missing or broken, or defines no ``model``; names file and line.
    """
    found = _load(spec, data, expected_source, sequence)
    return found if expected_source is None else replace(found, joins=expected_source.joins)


def _load(spec: str, data: str | Path | None, expected_source: ModelSource | None, sequence: int | None) -> UserModel:
    if spec.startswith(PREFIX):
        return _load_configured(spec, None if data is None else Path(data), expected_source, sequence)
    if sequence is not None:
        raise UsageError(f"`sequence={sequence}`: only hf: models have synthetic inputs; those of {spec} are its own")
    if data is not None:
        raise UsageError(f"`data={str(data)!r}`: only hf: models are given their data so; put dataset() into {spec}")
    if path_of(spec) is None:
        return _load_factory(spec, expected_source)
    path = Path(spec)
    if path.suffix != ".py":
        message = f"{spec}: give a Python file (model.py), package.module:factory or hf:config.json"
        files = (each.name for each in path.parent.glob("*.py"))
        raise unknown(UsageError, message, path.name, files)
    code = code_of_file(path)
    check_code(path, code.sha256, code.imports, expected_source)
    return _describe(spec, code, _execute(code), "model")


def _load_configured(
    spec: str, data: Path | None, expected_source: ModelSource | None, sequence: int | None
) -> UserModel:
    found = read_configured(spec)
    code = None if data is None else code_of_file(data)
    imports = {} if code is None else {code.path.name: code.sha256, **code.imports}
    check_code(found.path, found.sha256, imports, expected_source)
    functions: dict[str, Callable[..., Any]] = {} if found.loss is None else {"loss": found.loss}
    notes, variables = found.notes, dict[str, Any]()
    if code is not None:
        module = _execute(code)
        own = _functions(code, module)
        if not own:
            hooks = ", ".join(f"{name}()" for name in HOOKS if name != "model")
            raise ModelError(f"{data}: defines no dataset() and no other function of a model file: {hooks}")
        functions |= own
        variables = _variables(code.path, module)
    if "dataset" not in functions:
        sequence = found.sequence(sequence or (None if expected_source is None else expected_source.sequence))
        functions["dataset"] = partial(found.dataset, sequence)
        notes = (*notes, SYNTHETIC)
    elif sequence is not None:
        raise UsageError(f"`sequence={sequence}`: inputs are those of `data={str(data)!r}`; leave one of the two out")
    known = (spec, found.path, found.sha256, found.build, functions, data, notes)
    return UserModel(*known, sequence=sequence, imports=imports, **variables)


def _load_factory(spec: str, expected_source: ModelSource | None) -> UserModel:
    module_name, _, factory = spec.partition(":")
    if not factory.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(f"{spec}: expected package.module:factory")
    importlib.invalidate_caches()
    code = code_of_module(module_name, spec)
    check_code(code.path, code.sha256, code.imports, expected_source)
    use(code.importer())
    with user_code(code.path, "importing it"):
        module = importlib.import_module(module_name)
    return _describe(spec, code, module, factory)


_NONE_CHOSEN = "optimizer got an empty parameter list"
"""What torch says."""
_MODULE = "_autopar_model_"


def is_of_model_file(kind: type) -> bool:
    """Tell whether a class is made in a model file, whose module has a name that goes by the file's path."""
    return kind.__module__.startswith(_MODULE)


def _execute(code: Code) -> ModuleType:
    path = code.path
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    name = f"{_MODULE}{digest}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None:
        raise ModelError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        compiled = compile(code.source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ModelError(f"{path}:{error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    # Registered while it runs and after: classes of the file find their module by name (dataclasses, pickling).
    sys.modules[name] = module
    use(code.importer(name))
    try:
        with user_code(path, "importing it"):
            exec(compiled, module.__dict__)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _describe(spec: str, code: Code, module: ModuleType, factory: str) -> UserModel:
    path, model = code.path, getattr(module, factory, None)
    if model is None:
        raise missing_model(path, factory, module)
    model = check_hook(path, code.source, factory, model, HOOKS["model"])
    known = (spec, path, code.sha256, model, _functions(code, module))
    return UserModel(*known, imports=code.imports, **_variables(path, module))


def _functions(code: Code, module: ModuleType) -> dict[str, Callable[..., Any]]:
    found = {name: getattr(module, name, None) for name in HOOKS if name != "model"}
    refuse_misspelled(code.path, module)
    return {
        name: check_hook(code.path, code.source, name, value, HOOKS[name])
        for name, value in found.items()
        if value is not None
    }


def _variables(path: Path, module: ModuleType) -> dict[str, Any]:
    """Return what a file says beside its functions."""
    ignored, whole = getattr(module, "ignored_state", ()), getattr(module, "whole_batches", False)
    if not isinstance(ignored, (list, tuple)) or not all(isinstance(name, str) and name for name in ignored):
        raise ModelError(f'{path}: ignored_state is {a(ignored)}; it must be a list of paths, such as ["Net.calls"]')
    if not isinstance(whole, bool):
        raise ModelError(f"{path}: whole_batches is {a(whole)}; it must be True or False")
    return {"ignored_state": tuple(ignored), "whole_batches": whole}


class _OutputAside:
    """Standard output goes to standard error while any thread is in it: the last one that leaves puts it back."""

    def __init__(self) -> None:
        self._lock, self._count, self._before = threading.Lock(), 0, sys.stdout

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._before, sys.stdout = sys.stdout, sys.stderr
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                sys.stdout = self._before


_OUTPUT_ASIDE = _OutputAside()


@contextlib.contextmanager
def user_code(path: Path, what: str, argument_hint: str = "") -> Iterator[None]:
    """Run the user's code: standard output goes to standard error, exceptions become a ModelError with the line.

    Those that other arguments may have avoided say what was ``argument_hint``.

    Raises:
        ModelError: the code raised, or called ``sys.exit``.
    """
    try:
        with _OUTPUT_ASIDE:
            yield
    except AutoparError:
        raise
    except SystemExit as error:
        raise ModelError(f"{_where(error, path)}: {what} raised SystemExit({error.code!r}); remove the exit") from error
    except SyntaxError as error:
        raise ModelError(f"{error.filename or path}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        remedy = argument_hint if isinstance(error, (TypeError, AttributeError)) else ""
        raise users_error(what, error, _where(error, path), remedy) from error


def _where(error: BaseException, path: Path) -> str:
    """Return file and line: the innermost line of the user's file, else the file."""
    names = {str(path), str(path.resolve())}
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in names]
    return f"{path}:{lines[-1]}" if lines else str(path)


def stage_traits(plan: Plan, options: tuple[str, ...]) -> list[StageTraits]:
    """Return what is told of every stage of a plan: the defaults but for ``options``, which the function asks for.

    A rank's several stages have the same replicas, and no delay: they are told alike.

    Raises:
        UsageError: stages share a parameter, and are told different things.
    """
    if plan.pipelines and options:
        raise UsageError(
            f"optimizer() asks for {options[0]}, which is another in every pipeline, whose optimizers go alike; leave "
            f"{options[0]} out of its parameters, or plan with `policy='sync'`"
        )
    delays = [plan.policy.delay(each) for each in plan.depths]
    replicas = [stage.replicas for stage in plan.stages]
    every = [StageTraits(*each) for each in zip(delays, replicas, strict=True)]
    found = [StageTraits(**{name: getattr(each, name) for name in options}) for each in every]
    for tied in plan.tied:
        different = dict.fromkeys(found[stage] for stage in tied.stages)
        if len(different) > 1:
            name = next(name for name in options if len({getattr(each, name) for each in different}) > 1)
            other = "policy='sync'" if name == "delay" else "max_stages=1"
            values = " and ".join(dict.fromkeys(f"{getattr(each, name):g}" for each in different))
            raise UsageError(
                f"optimizer() asks for {name}, which is {values} on stages that share {tied.parameter}, whose copies "
                f"would part; leave {name} out of its parameters, or plan with `{other}`"
            )
    return found
