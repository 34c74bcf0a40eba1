"""Planning from Python is the planner's, with what a reader wants to know attached."""

from pathlib import Path

import pytest

import autopar
from autopar.errors import UsageError
from autopar.formats.prediction import SIMPLICITY, MetPlan
from autopar.planner import PlanOptions, simulate
from autopar.planner import plan as search
from autopar.planner.comparison import compare
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


def test_a_plan_is_priced_again_for_machines_by_name_and_sizes_in_words(tmp_path: Path) -> None:
    profile = gpt_profile(blocks=4)
    made = autopar.plan(profile, local_cluster(2), gpus=2, min_stages=2, schedule="1f1b")
    slow = made.reprice(bytes_per_s="1Mbps")
    assert slow.bytes_per_s == 125_000
    assert slow.predicted.step_s > 2 * made.predicted.step_s
    assert slow.reprice(bytes_per_s="100Gbps").predicted.step_s < slow.predicted.step_s
    small = made.reprice(memory_bytes="1MiB")
    assert set(small.predicted.limit_bytes) == {2**20}
    assert min(small.predicted.peak_bytes) > 2**20
    assert "priced again, and not searched" in small.explain()
    assert slow.timeline().end_s == slow.predicted.step_s
    made.save(tmp_path / "plan.json")
    read = autopar.Plan.load(tmp_path / "plan.json")
    assert read.reprice(local_cluster(2), profile=profile).predicted == made.reprice().predicted
    with pytest.raises(UsageError, match="pass `profile` and `cluster`"):
        read.reprice(local_cluster(2))
    with pytest.raises(UsageError, match="`memory_bytes`"):
        made.reprice(memory_bytes="much")
    with pytest.raises(UsageError, match="no GPU called 'H1000'"):
        made.reprice("4xH1000")


@pytest.mark.parametrize("options", [{}, {"stages": "0-2:1,3-5:1"}, {"policy": "stash"}], ids=str)
def test_what_progress_raises_ends_a_search_whenever_it_does(options: dict[str, str]) -> None:
    profile, cluster, told = gpt_profile(blocks=4), local_cluster(2), 0

    class StoppedError(Exception):
        """Nobody waits for the plan."""

    def tell(what: str, share: float) -> None:
        nonlocal told
        told += 1
        if told == last:
            raise StoppedError

    last = 0
    expected = autopar.plan(profile, cluster, gpus=2, progress=tell, **options)
    every, told = told, 0
    assert every > (5 if options else 30), "with every candidate"
    for last in (1, every // 2, every):
        told = 0
        with pytest.raises(StoppedError):
            autopar.plan(profile, cluster, gpus=2, progress=tell, **options)
        assert told == last
    last = 0
    assert autopar.plan(profile, cluster, gpus=2, **options) == expected


@pytest.mark.parametrize("options", [{}, {"schedule": "Interleaved1F1B"}, {"stages": "0-2:1,3-5:1"}], ids=str)
def test_progress_ascends_and_changes_nothing(options: dict[str, str]) -> None:
    profile, cluster, asked = gpt_profile(blocks=4), local_cluster(2), PlanOptions(gpus=2, **options)  # type: ignore[arg-type]
    told: list[tuple[str, float]] = []
    made = search(profile, cluster, asked, progress=lambda what, share: told.append((what, share)))
    assert made.dumps() == search(profile, cluster, asked).dumps()
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert all(what and 0 <= share < 1 for what, share in told)
    met: list[MetPlan] = []
    assert search(profile, cluster, asked, met=met.extend).dumps() == made.dumps()
    assert [each.step_s for each in met] == sorted(each.step_s for each in met)
    assert met[0].step_s == pytest.approx(made.predicted.step_s, rel=0.02) or "stages" in options
    assert {len(each.simplicity) for each in met} == {len(SIMPLICITY)}
    assert len(set(met)) == len(met) > 1
    told.clear()
    compare(profile, cluster, PlanOptions(gpus=2), lambda what, share: told.append((what, share)))
    assert len(told) > 5
    assert [share for _, share in told] == sorted(share for _, share in told)


@pytest.mark.parametrize("kind", [str, Path])
def test_profiles_and_clusters_are_given_as_files_wherever_they_are_given(kind: type, tmp_path: Path) -> None:
    profile, cluster = gpt_profile(blocks=4), local_cluster(2)
    profile.save(tmp_path / "profile.json")
    cluster.save(tmp_path / "cluster.json")
    files = kind(tmp_path / "profile.json"), kind(tmp_path / "cluster.json")
    asked = {"gpus": 2, "min_stages": 2, "schedule": "1f1b"}
    made = autopar.plan(profile, cluster, **asked)
    assert autopar.plan(*files, **asked).stages == made.stages
    assert autopar.compare(*files, **asked).plan.stages == made.stages
    made.save(tmp_path / "plan.json")
    read = autopar.Plan.load(tmp_path / "plan.json")
    assert list(read.timeline(*files)) == list(made.timeline())
    assert autopar.simulate(read, *files).end_s == made.timeline().end_s
    assert read.reprice(files[1], profile=files[0]).predicted == made.reprice().predicted
    assert read.throughput(*files, tokens_per_sample=8) == made.throughput(tokens_per_sample=8)
    assert autopar.rehearse(read, profile=files[0], cluster=files[1], steps=1).steps_s[0] > 0
    assert autopar.Cluster.of(files[1]).devices == cluster.devices
