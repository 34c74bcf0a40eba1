"""Any plan of a hard model gives what plain training gives; ranks are threads, so that many plans can be tried."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from autopar.formats.plan import Plan
from dictated import dictate
from drawn_models import captured, equals_plain, plans


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans("everything"))
@pytest.mark.reliability(38, 39, 40)
def test_skips_ties_masks_integers_and_token_counts_survive_any_plan(plan: Plan) -> None:
    equals_plain("everything", plan)


@pytest.mark.parametrize("widths", [(1, 1), (2, 1, 2)])
@pytest.mark.reliability(38)
def test_a_tied_parameter_stays_equal_where_only_one_of_its_stages_gives_it_a_gradient(widths: tuple[int, ...]) -> None:
    model, graph, _ = captured("detached")
    equals_plain("detached", dictate(graph, model, widths, 2, 4))


@pytest.mark.parametrize("widths", [(2,), (3, 1)])
def test_a_parameter_of_several_recomputed_layers_is_reduced_when_all_of_them_have_run(widths: tuple[int, ...]) -> None:
    model, graph, _ = captured("everything")
    cuts = [len(graph.layers) - 1] if len(widths) > 1 else None
    equals_plain("everything", dictate(graph, model, widths, 2, 5, cuts=cuts, recompute=True))


@pytest.mark.parametrize("name", ["narrow_gpt", "narrow_resnet"])
@pytest.mark.reliability(41, 42)
def test_dropout_and_batch_statistics_survive_any_plan(name: str) -> None:
    # Two rows or more for batch statistics; blocks draw random numbers, by a generator that threads take in turn.
    @settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
    @given(plan=plans(name, most_ranks=6, most_rows=7, least_share=2))
    def trains_alike(plan: Plan) -> None:
        equals_plain(name, plan)

    trains_alike()
