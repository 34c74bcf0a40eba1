"""Programs edited within what the checks allow train as the plan's own."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.formats.plan import Plan
from drawn_models import equals_plain, plans
from edits import edited


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans("everything"), seed=st.integers(0, 2**16))
def test_actions_moved_about_train_alike(plan: Plan, seed: int) -> None:
    equals_plain("everything", plan, edited(plan, seed))
