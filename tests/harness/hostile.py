"""Objects with names that nobody would give: what shows them has to stay within its bytes, and inert."""

from collections.abc import Callable
from pathlib import Path

import autopar
from autopar.api.objects import Shown, shown_as
from autopar.formats.contest import Contestant, ContestResult, ContestRow
from autopar.formats.report import ComparisonRow
from played import play, small_plan
from random_problems import gpt_profile, local_cluster

NAMES = [
    '</style><script>alert(1)</script>"><img src=x onerror=alert(1)> {{ 7 * 7 }} {% raw %} $\\frac{$ \\[x]',
    "<" * 1024,
    "\U0001f600" * 1024,
]


def _profile(name: str) -> autopar.Profile:
    profile = gpt_profile(blocks=3)
    changes = {
        "model": profile.model.model_copy(update={"source": name}),
        "device": profile.device.model_copy(update={"name": name}),
        "notes": (name,) * 300,
    }
    return autopar.Profile.parse(profile.model_copy(update=changes).dumps().replace('"wte"', _json(name)), Path("p"))


def _json(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _cluster(name: str) -> autopar.Cluster:
    cluster = local_cluster(3)
    devices = tuple(
        each.model_copy(update={"type": name, "price_per_hour": at}) for at, each in enumerate(cluster.devices)
    )
    return shown_as(
        autopar.Cluster, cluster.model_copy(update={"name": name, "devices": devices, "notes": (name,) * 300})
    )


def _plan(name: str) -> autopar.Plan:
    plan = small_plan((1, 1), 4)
    stages = [stage.model_copy(update={"layers": (name,), "types": (name,)}) for stage in plan.stages]
    model = plan.model.model_copy(update={"source": name})
    return shown_as(
        autopar.Plan, plan.model_copy(update={"model": model, "stages": tuple(stages), "notes": (name,) * 300})
    )


def _report(name: str) -> autopar.Report:
    kept = autopar.Report.load(Path(__file__).parents[1] / "formats/kept/report.json")
    losses = {name: kept.loss, "$x$": kept.loss}
    return kept.model_copy(update={"model": name, "device": name, "losses": losses, "notes": (name,) * 300})


def _comparison(name: str) -> autopar.Comparison:
    rows = (ComparisonRow(name, name, 4, name, 0.5, 2**30), *(ComparisonRow(name, infeasible=name),) * 200)
    return autopar.Comparison(rows, _plan(name))


def _contests(name: str) -> autopar.RunComparison:
    contestant = Contestant(name, _plan(name), name)
    trained = ContestRow(contestant, (ContestResult(loss=(2.0, 1.0), step_s=0.5, peak_bytes=2**30),))
    refused = (ContestRow(Contestant(name, refusal=name), ()),) * 200
    return autopar.RunComparison(name, (*refused, trained), 1.5, name, (name,) * 300)


HOSTILE: dict[str, Callable[[str], Shown]] = {
    "profile": _profile,
    "cluster": _cluster,
    "plan": _plan,
    "report": _report,
    "comparison": _comparison,
    "contests": _contests,
    "timeline": lambda name: autopar.Timeline.of(play(small_plan((2, 1), 4))),
}
