"""Models of the Transformers library, trained by teams as one rank trains them."""

from itertools import groupby
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.options.train import TrainSettings
from autopar.runtime.stage.parameters import check_split_seeds
from family_cases import Layout, Variant, differences, family_case, plan_of, thread_variants, train_threads

pytest.importorskip("transformers")
EVERY = {key: list(found) for key, found in groupby(thread_variants(), key=lambda each: each[:2])}
# Both kinds of attention are tried in turn; ``benchmarks/family_ranks.py`` tries both of each model.
BY_MODEL = {key: found for at, (key, found) in enumerate(EVERY.items()) if at % 4 in (0, 3)}


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("model", BY_MODEL, ids="-".join)
def test_teams_train_a_model_as_one_rank_does(model: tuple[str, str], tmp_path: Path) -> None:
    case = family_case(*model, tmp_path)
    assert len(case.graph.layers) > 2
    for at, variant in enumerate(BY_MODEL[model]):
        folder = tmp_path / str(at)
        folder.mkdir()
        found = differences(case, variant, folder)
        assert found.within(variant), (variant, found)


@pytest.mark.slow
def test_parts_that_draw_for_themselves_train_alike_each_time(tmp_path: Path) -> None:
    """With recomputation, too, whose masks are those of the forward; other devices a replica draw other masks."""
    case, settings = family_case("gpt2", "sdpa", tmp_path), TrainSettings(split_seeds=True)
    losses = {}
    for size, recompute in ((2, False), (2, True), (4, False)):
        variant = Variant("gpt2", "sdpa", Layout((1,), (size,)), False, ("1f1b", 1), recompute, "none")
        folder = tmp_path / f"{size}-{recompute}"
        losses[size, recompute] = train_threads(case, plan_of(case, variant), folder, settings)
    assert losses[2, False] == pytest.approx(losses[2, True], rel=1e-12)
    assert losses[2, False] != pytest.approx(losses[4, False], rel=1e-6)
    assert losses[2, False] == pytest.approx(losses[4, False], rel=0.1)


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "attention", "size"), [("gpt2", "sdpa", 1), ("gpt2", "eager", 2)])
def test_seeds_are_not_split_where_no_part_draws(name: str, attention: str, size: int, tmp_path: Path) -> None:
    case = family_case(name, attention, tmp_path)
    variant = Variant(name, attention, Layout((1,), (size,)), False, ("1f1b", 1), False, "none")
    with pytest.raises(UsageError, match="`split_seeds`: no stage of several devices a replica attends"):
        check_split_seeds(plan_of(case, variant), case.graph)
