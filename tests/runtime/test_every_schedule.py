"""Every schedule trains as the plain loop: with replicas, with fewer micro-batches than stages, and with one."""

from __future__ import annotations

import pytest

from autopar.formats.plan import chunks_of, layout_of
from autopar.schedules import SCHEDULES
from dictated import dictate
from drawn_models import captured, equals_plain


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unequal_widths_train_as_the_plain_loop(schedule: str, micro_batches: int) -> None:
    model, graph, _ = captured("everything")
    chunks = chunks_of(layout_of(schedule)) or 2
    plan = dictate(graph, model, (1, 3, 2), micro_batches, 3, schedule, chunks=chunks)
    equals_plain("everything", plan)
