"""Reports: what a verification says of its differences, and files that no run can have written."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import FileError
from autopar.formats.report import Difference, Report, Verification

KEPT = Path(__file__).parent / "kept" / "report.json"


def test_ranks_trained_what_the_plain_loop_trained_where_nothing_differs_by_more_than_is_allowed() -> None:
    draw = random.Random(0)
    outcomes = set()
    for _ in range(100):
        pairs = [(draw.choice([None, 0.0, 1e-9, 1e-3]), draw.choice([0.0, 1e-9, 1e-2])) for _ in range(3)]
        differences = tuple(Difference("gradients", 4, most, "w on rank 1", allowed, "w") for most, allowed in pairs)
        found = Verification(2, 4, "float64", "eps", differences)
        expected = [most is not None and most <= allowed for most, allowed in pairs]
        content: dict[str, Any] = found.as_dict()
        assert [each["equal"] for each in content["differences"]] == expected
        assert content["equal"] == found.equal == all(expected)
        again = json.loads(json.dumps(content))["differences"]
        assert [(each["largest"], each["allowed"]) for each in again] == pairs
        outcomes.add(found.equal)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan_sha256": "0" * 63}, r"\$\.plan_sha256: "),
        ({"bubble": 1.5}, r"\$\.bubble: "),
        ({"samples_per_s": -1.0}, r"\$\.samples_per_s: "),
        ({"peak_kind": "guessed"}, r"\$\.peak_kind: "),
        ({"gradient_norm": [-1.0]}, r"\$\.gradient_norm\[0\]: "),
        ({"kinds": [{"kind": "Q", "actions": 1, "measured_s": 1, "predicted_s": 1, "ratio": 1}]}, r"kinds\[0\]\.kind"),
        ({"rank_times": [{"rank": 0, "stages": []}]}, r"\$\.rank_times\[0\]\.stages: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_report_that_no_run_can_have_written_is_refused_with_its_path(change: dict[str, Any], message: str) -> None:
    content = json.loads(KEPT.read_text())
    assert Report.parse(json.dumps(content), KEPT).ranks == content["ranks"]
    with pytest.raises(FileError, match=message):
        Report.parse(json.dumps({**content, **change}), KEPT)
