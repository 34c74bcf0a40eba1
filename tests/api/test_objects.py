"""Planning from Python is the planner's, with what a reader wants to know attached."""

from pathlib import Path

import pytest

import autopar
from autopar.errors import UsageError
from autopar.planner import PlanOptions, simulate
from autopar.planner import plan as search
from autopar.planner.plan import compare
from random_problems import gpt_profile, local_cluster


def test_a_plan_from_python_is_the_planners_and_a_cluster_has_a_name(tmp_path: Path) -> None:
    profile, cluster = gpt_profile(blocks=4), local_cluster(2)
    made = autopar.plan(profile, cluster, gpus=2, min_stages=2, schedule="1f1b")
    assert made.dumps() == search(profile, cluster, PlanOptions(gpus=2, min_stages=2, schedule="1f1b")).dumps()
    assert "what binds" in made.explain() == str(made)
    timeline, expected = made.timeline(), simulate(made, profile, cluster)
    assert list(timeline) == list(expected)
    timeline.plot(path=tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    made.save(tmp_path / "plan.json")
    read = autopar.Plan.load(tmp_path / "plan.json")
    assert read.dumps() == made.dumps()
    with pytest.raises(UsageError, match="read from a file needs its profile and cluster"):
        read.timeline()
    assert list(read.timeline(profile, cluster)) == list(expected)
    cluster = autopar.Cluster.of("2x4xA100-80G:200Gbps")
    assert isinstance(cluster, autopar.Cluster)
    assert len(cluster.devices) == 8
    with pytest.raises(AttributeError, match="module 'autopar' has no attribute 'plans'"):
        autopar.plans  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("options", [{}, {"schedule": "Interleaved1F1B"}, {"stages": "0-2:1,3-5:1"}], ids=str)
def test_progress_ascends_and_changes_nothing(options: dict[str, str]) -> None:
    profile, cluster, asked = gpt_profile(blocks=4), local_cluster(2), PlanOptions(gpus=2, **options)  # type: ignore[arg-type]
    told: list[tuple[str, float]] = []
    made = search(profile, cluster, asked, progress=lambda what, share: told.append((what, share)))
    assert made.dumps() == search(profile, cluster, asked).dumps()
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert all(what and 0 <= share < 1 for what, share in told)
    told.clear()
    compare(profile, cluster, PlanOptions(gpus=2), lambda what, share: told.append((what, share)))
    assert len(told) > 5
    assert [share for _, share in told] == sorted(share for _, share in told)
