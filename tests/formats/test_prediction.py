"""Predictions of plans: what an alternative is, and shares and bounds that cannot be."""

import pytest
from pydantic import ValidationError

from autopar.formats.prediction import Alternative, BoundPart, Bounds, Prediction, Price, Shares


def test_an_alternative_has_a_time_or_a_reason_and_what_is_not_known_is_left_out() -> None:
    assert Alternative(name="slow", step_s=2.0).infeasible is None
    assert Alternative(name="large", infeasible="stage 1 needs more").step_s is None
    for step_s, infeasible in ((None, None), (2.0, "stage 1 needs more")):
        with pytest.raises(ValidationError, match="exactly one of step_s and infeasible must be given"):
            Alternative(name="both or none", step_s=step_s, infeasible=infeasible)
    known = Prediction(step_s=1.0, lower_bound_s=0.5, bubble=0.25, peak_bytes=(3, 2), communication="measured")
    assert Prediction.model_validate_json(known.model_dump_json()) == known
    assert (known.bounds, known.shares, known.binding, known.limit_bytes) == (None, None, (), ())


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Shares, {"computing": 1.1, "messages": 0.0, "reduction": 0.0, "idle": 0.0}),
        (Shares, {"computing": 0.5, "messages": -0.1, "reduction": 0.0, "idle": 0.6}),
        (Bounds, {"work_s": -1.0, "contiguous_s": 1.0, "linked_s": 1.0}),
        (BoundPart, {"term": "luck", "stage": 0, "seconds": 1.0}),
        (BoundPart, {"term": "compute", "stage": -1, "seconds": 1.0}),
        (Price, {"per_hour": 0.0, "per_step": 1.0, "per_million_samples": 1.0, "lower_bound_per_step": 1.0}),
        (Prediction, {"step_s": float("nan"), "lower_bound_s": 0.0, "bubble": 0.0, "peak_bytes": ()}),
        (Prediction, {"step_s": 1.0, "lower_bound_s": 0.0, "bubble": 1.5, "peak_bytes": ()}),
        (Prediction, {"step_s": 1.0, "lower_bound_s": 0.0, "bubble": 0.0, "peak_bytes": (-1,)}),
    ],
)
def test_values_that_no_prediction_has_are_refused(kind: type, values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        kind(**values)
