"""Prefixes of stages against folding them one by one; and one fold against the other."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autopar.planner.bounds import LinkTerms, StageTerms, Terms, fold, fold_chain
from autopar.planner.search.tables import NOTHING, Prefix


def _stage(rng: random.Random) -> StageTerms:
    numbers = [rng.choice([0.0, rng.uniform(0, 3)]) for _ in range(4)]
    halves = rng.choice([(None, None), (rng.uniform(0, 60), rng.uniform(0, 60))])
    return StageTerms(*numbers, rng.uniform(1, 4), rng.uniform(0, 9), *halves)


def _link(rng: random.Random, *, whole: bool = False) -> LinkTerms:
    forth = whole or rng.random() < 0.8
    back = whole or (forth and rng.random() < 0.8)
    numbers = [rng.uniform(0, 1) if there else 0.0 for there in (forth, back)]
    return LinkTerms(forth, back, *numbers, *(4 * each for each in numbers))


def test_a_prefix_gives_what_folding_its_stages_gives() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        chain = [(_stage(rng), _link(rng)) for _ in range(rng.randint(0, 7))]
        trip, backward, done = (rng.uniform(0, 20) for _ in range(3))
        behind = Terms(trip, backward, done, max(done, rng.uniform(0, 20)))
        prefix: Prefix = NOTHING
        for stage, link in chain:
            prefix = prefix.then(stage, link)
        folded = behind
        for stage, link in reversed(chain):
            folded = fold(stage, link, folded)
        assert float(prefix.step_s(behind)) == pytest.approx(float(folded.step_s), rel=1e-12)


def test_a_prefix_takes_arrays() -> None:
    rng = random.Random(1)
    prefix = NOTHING.then(_stage(rng), _link(rng, whole=True)).then(_stage(rng), _link(rng, whole=True))
    columns = np.array([[1.0, 5.0, 30.0], [2.0, 6.0, 31.0], [3.0, 7.0, 1.0], [4.0, 8.0, 40.0]])
    found = prefix.step_s(Terms(*columns))
    each = [float(prefix.step_s(Terms(*column))) for column in columns.T]
    assert np.asarray(found).tolist() == pytest.approx(each)


def test_folding_a_chain_is_folding() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        stage, link = _stage(rng), _link(rng, whole=True)
        rows = np.array([[rng.uniform(0, 20) for _ in range(6)] for _ in range(4)])
        rows[3] = np.maximum(rows[2], rows[3])
        expected = fold(stage, link, Terms(*rows))
        found = fold_chain(stage, link, Terms(*rows.copy()))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
