"""Test of stacks: a rank that stands says where, and the next test has ranks."""

import os

import pytest

from paths import BENCHMARKS, HARNESS
from suite.warm import TESTS

SUITE = """
import pytest
from autopar.ranks.pool import RankPool
from suite import warm

@pytest.fixture(scope="session", autouse=True)
def ranks():
    warm.use_for_ranks()
    yield
    warm.close()

def test_warms():
    with RankPool(2) as pool:
        pool.run("jobs_for_ranks:add_up")

@pytest.mark.timeout(15)
def test_stands():
    with RankPool(2) as pool:
        pool.run("stands:stand")

def test_goes_on():
    with RankPool(2) as pool:
        pool.run("jobs_for_ranks:add_up")
"""

JOBS = """
import time

def stand(context, arguments):
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_rank_that_stands_says_where_and_the_next_test_has_ranks(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = map(str, [pytester.path, TESTS, HARNESS, BENCHMARKS])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    pytester.makepyfile(SUITE)
    pytester.path.joinpath("stands.py").write_text(JOBS)
    ran = pytester.runpytest_subprocess("-p", "suite.stacks")
    ran.assert_outcomes(failed=1, passed=2)
    ran.stdout.fnmatch_lines(["*Timeout (>15.0s)*", "stack of autopar-rank-1 (*):", "*stands.py*, line 5 in stand"])
