"""Synchronous pipelines of DAPPLE's published models on 16 devices: bounds, steps, and DAPPLE's plan beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopar.formats.cluster import Cluster, Device, Link
from autopar.interop.pipedream import pipedream_profile
from autopar.planner import PlanOptions, plan
from autopar.planner.costs.model import CostModel
from autopar.planner.peers import dapple
from autopar.planner.peers.prices import Prices, trial
from autopar.planner.simulator.simulate import Simulator

NO_LIMIT = 2**60
FLAT = Cluster(
    devices=(Device(type="cuda", memory_bytes=NO_LIMIT),) * 16,
    links=(Link(level="node", latency_s=0.0, bytes_per_s=1e9),),
)


def _digits(seconds: float) -> float:
    """As many digits as the table's figures have."""
    return float(f"{seconds:.4g}")


@pytest.mark.slow
@pytest.mark.skipif("AUTOPAR_DATA" not in os.environ, reason="AUTOPAR_DATA names no folder of published data")
@pytest.mark.parametrize(
    ("name", "rows", "micro_batches", "bytes_per_s", "bound_s", "step_s", "gap"),
    [
        ("vgg-19-pbs-32", 32, 64, 3e9, 0.6303, 0.6456, 0.02),
        ("bert-48-pbs-2", 2, 32, 3e9, 0.9189, 0.9381, 0.02),
        ("xlnet-36-pbs-1", 1, 128, 3e9, 2.796, 2.861, 0.02),
        ("vgg-19-pbs-32", 32, 64, 1.25e9, 0.7071, 0.7284, 0.05),
        ("bert-48-pbs-2", 2, 32, 1.25e9, 0.9877, 1.046, 0.05),
        ("xlnet-36-pbs-1", 1, 128, 1.25e9, 2.948, 3.09, 0.05),
    ],
)
def test_steps_of_published_profiles_stay_as_short_and_bounds_as_tight_and_dapples_plan_is_never_faster(
    name: str, rows: int, micro_batches: int, bytes_per_s: float, bound_s: float, step_s: float, gap: float
) -> None:
    path = Path(os.environ["AUTOPAR_DATA"]) / "dapple" / f"{name}.txt"
    profile = pipedream_profile(path.read_text(), path, rows)
    options = PlanOptions(
        batch=rows * micro_batches,
        bytes_per_s=bytes_per_s,
        micro_batches=micro_batches,
        divisible=True,
        shard="none",
        exact=True,
    )
    found = plan(profile, FLAT, options).predicted
    assert _digits(found.lower_bound_s) >= bound_s
    assert _digits(found.step_s) <= step_s
    assert found.step_s <= (1 + gap) * found.lower_bound_s
    costs = CostModel(profile, FLAT, options)
    simulator = Simulator(costs)
    theirs, reason = trial(simulator, "1f1b", [micro_batches], dapple.propose(Prices(costs, micro_batches)))
    assert theirs is not None
    assert reason is None
    assert simulator.step_s(theirs) >= found.step_s
