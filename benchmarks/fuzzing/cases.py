"""Cases: a random model with a random plan, taken through profile, plan and run, and held against the plain loop."""

from __future__ import annotations

import contextlib
import math
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from autopar.capture import UserModel, load
from autopar.capture.plain.mini_batch import PlainRun
from autopar.errors import AutoparError, ModelError, TrainingError, UsageError
from autopar.formats.profile import Profile
from autopar.options.profile import ProfileOptions
from autopar.profiler import profile as measure
from autopar.ranks.pool import RankPool
from autopar.runtime.start.workspace import Workspace
from fuzzing.asks import Ask, draw_ask, edited, in_teams, planned, unflushed
from fuzzing.compare import Difference, worst
from fuzzing.grammar import Recipe, draw, parts_of, write
from fuzzing.ranks import HungError, Kept, in_processes, in_threads
from fuzzing.truth import trains, truth_of

__all__ = ["Case", "Model", "Outcome", "Result", "attempt", "case_of"]

STEPS = 4
PLANS = 3
"""Cases in a row that have the same model."""
IN_PROCESSES = 0.2
"""Of the cases that are not sharded: how many have ranks as processes."""
ATTEMPTS = 20
REPLICATED = 0.4
"""Of the plans of models whose forwards write."""
MOVED, ROUNDING = 1e-15, 100.0
"""By how much weights are moved to see what rounding makes of a model, and how many times that is let pass."""
WRAPPED = re.compile(r"\b(?!ModuleNotFound)[A-Z]\w*(Error|Exception)\b: ")
"""An error that nobody foresaw, within a message."""
UNFLUSHED = 1_000_000
"""Cases from this number on have plans that are never flushed."""
TEAMS, BOTH = 2_000_000, 3_000_000
"""Cases from these on have replicas that several ranks run together, in plans that are flushed, and that never are."""
OF_POLICIES = (
    r"`policy='(sync|stash|2bw)'`",
    r"which weight policy \w+ has none of",
    r"layers write buffers that replicas",
)
"""By what plans without flushes are refused, whatever the model is made of."""
UNSLICED = "nothing between the layers of these stages can be kept in slices"
"""By what slices of the sequence are refused, whatever the model is made of."""
COUNTLESS = "count of 0 for the whole mini-batch"
"""What mini-batches without any label are refused by, as the plain loop refuses them."""
OF_LISTED = ("a count of its own, which a model whose layers are listed cannot", "has backwards in two halves, which")
"""By what models whose layers are listed are refused, with counts by name, and with layers whose backward is whole."""
EMPTY = "step\\(\\) raised ZeroDivisionError"
"""By what Adafactor refuses a parameter without elements, in the plain loop, too."""

Outcome = Literal["equal", "rounding", "refused", "false refusal", "taken", "wrong", "crash", "hang", "skipped"]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Result:
    """How a case ended."""

    outcome: Outcome
    where: str
    """The door at which it was refused or failed: profile, plan, edit, prepare or run."""
    said: str
    """The refusal, or the worst difference."""


@dataclass(frozen=True)
class Case:
    """A model and what is asked of its plan."""

    number: int
    recipe: Recipe
    chance: str
    """Seeds the plan, whose layers are known only when the model is captured."""
    processes: bool
    ask: Ask | None = None
    """What is asked of the plan, where it is not to be drawn."""


class _EndedError(Exception):
    """A case ended before it was trained."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.said)
        self.result = result


class Model:
    """A model file, profiled once."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        """Write the file."""
        self.recipe, self.path = recipe, folder / "model.py"
        folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(write(recipe))

    @cached_property
    def user(self) -> UserModel:
        """The file, loaded."""
        return load(str(self.path))

    @cached_property
    def _measured(self) -> Profile | Result:
        try:
            options = ProfileOptions(batch=4, device="cpu", budget_s=0.01, accept_loss=self.recipe.accepted)
            return _through("profile", lambda: measure(self.user, options))
        except _EndedError as ended:
            return ended.result

    @property
    def profile(self) -> Profile:
        """Its profile.

        Raises:
            _EndedError: it was refused, each time anew.
        """
        if isinstance(self._measured, Result):
            raise _EndedError(self._measured)
        return self._measured


def case_of(seed: int, number: int) -> Case:
    """Return a case by its number; models that torch itself does not train are drawn again."""
    model, plan = divmod(number, PLANS)
    every = (draw(f"{seed}/{model}/{again}") for again in range(ATTEMPTS))
    with _silent():
        recipe = next(recipe for recipe in every if trains(write(recipe)))
    chance = f"{seed}/{model}/plan {plan}"
    return Case(number, recipe, chance, random.Random(f"{chance}/ranks").random() < IN_PROCESSES)


def attempt(case: Case, model: Model, folder: Path, pool: Callable[[], RankPool]) -> tuple[Ask | None, Result]:
    """Take a case through all doors; files go into ``folder``."""
    ask = None
    with _silent():
        try:
            profile = model.profile
            ask = case.ask or _drawn(case, model.recipe, profile)
            result = _trained(case, ask, model, folder, pool)
        except _EndedError as ended:
            result = ended.result
    return ask, _judged(result, case.recipe, ask)


def _drawn(case: Case, recipe: Recipe, profile: Profile) -> Ask:
    """Draw a plan; seldom one with replicas where they would be refused."""
    chance = random.Random(case.chance)
    replicas = recipe.replicas and (not recipe.writes or chance.random() < REPLICATED)
    ask = draw_ask(chance, len(profile.layers), recipe.least_rows, replicas=replicas, writes=recipe.writes)
    if UNFLUSHED <= case.number < TEAMS or case.number >= BOTH:
        ask = unflushed(chance, ask)
    return in_teams(chance, ask, profile) if case.number >= TEAMS else ask


def _trained(case: Case, ask: Ask, model: Model, folder: Path, pool: Callable[[], RankPool]) -> Result:
    made = _through("plan", lambda: planned(ask, model.profile))
    plan = _through("edit", lambda: edited(made, ask, model.recipe.least_rows))
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.json")
    workspace = Workspace(folder)
    _through("prepare", lambda: workspace.prepare(model.user, plan, None))

    def train() -> list[Kept]:
        if case.processes or ask.shard != "none":
            return in_processes(pool(), plan, model.user, folder, STEPS)
        return in_threads(plan, model.user, folder, STEPS)

    return _held_against(lambda moved: truth_of(model.path, plan, STEPS, moved), train)


def _held_against(plainly: Callable[[float], PlainRun], train: Callable[[], list[Kept]]) -> Result:
    """Train both ways, and compare."""
    try:
        truth = plainly(0.0)
    except (ModelError, UsageError) as error:
        return Result("skipped", "truth", str(error))
    except TrainingError as error:
        _through("run", train)
        return Result("wrong", "run", f"the plain loop refuses: {error}")
    if not all(map(math.isfinite, truth.losses)):
        return Result("skipped", "truth", "the plain loop's loss is not finite")
    found = worst(truth, _through("run", train))
    return Result("equal", "run", "") if found[1] <= 1.0 else _unequal(found, truth, plainly)


def _unequal(found: Difference, truth: PlainRun, plainly: Callable[[float], PlainRun]) -> Result:
    """Tell a wrong result from one that rounding alone would change as much."""
    what, by = found
    said = f"{what}: {by:.1e} times what is allowed"
    if math.isfinite(by):
        other = plainly(MOVED)
        kept = Kept([(loss, 0.0) for loss in other.losses], other.gradients, other.parameters, other.buffers, 0)
        moved, most = worst(truth, [kept])
        if by <= ROUNDING * most:
            return Result("rounding", "run", f"{said}; of weights moved by {MOVED}, {moved}: {most:.1e}")
    return Result("wrong", "run", said)


def _through(where: str, call: Callable[[], _Value]) -> _Value:
    """Call one of the product's doors, and tell how it refuses or fails."""
    try:
        return call()
    except HungError as error:
        raise _EndedError(Result("hang", where, str(error))) from error
    except AutoparError as error:
        said = str(error)
        unforeseen = error.exit_code in (1, 5) and WRAPPED.search(said)
        raise _EndedError(Result("crash" if unforeseen else "refused", where, said)) from error
    except Exception as error:
        sys.stderr.write(traceback.format_exc())
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        raise _EndedError(Result("crash", where, said[:500])) from error


def _judged(result: Result, recipe: Recipe, ask: Ask | None) -> Result:
    """Tell refusals that a part of the model accounts for from false ones, and what should have been refused."""
    parts = parts_of(recipe)
    if result.outcome == "refused":
        patterns = [COUNTLESS, *(p.refusal for p in parts if p.refusal), *(OF_POLICIES if ask and ask.depths else ())]
        patterns += [UNSLICED] if ask and ask.in_slices else []
        patterns += OF_LISTED if recipe.listed else []
        patterns += [EMPTY] if "empty_parameter" in recipe.blocks else []
        allowed = any(re.search(pattern, result.said) for pattern in patterns)
        return result if allowed else Result("false refusal", result.where, result.said)
    several = ask is not None and (ask.micro_batches > 1 or ask.ranks > 1)
    if result.outcome == "equal" and several and any(part.must for part in parts):
        names = ", ".join(part.name for part in parts if part.must)
        return Result("taken", result.where, f"{names} should have been refused")
    return result


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Let libraries warn about odd models unheard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
