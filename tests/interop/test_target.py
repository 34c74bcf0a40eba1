"""What all exports share: heads, comments, modules of stages, and machines in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autopar.errors import UsageError
from autopar.exports import TARGETS
from autopar.interop.target import (
    ExportSubject,
    comment,
    equal_nodes,
    heading,
    modules_of_stage,
    nodes_of,
    usual_depths,
)
from equal_plans import equal_plan, llama_profile


def subject(schedule: str = "1f1b", nodes: Sequence[int] | None = None, **options: object) -> ExportSubject:
    profile = llama_profile(6)
    plan, cluster = equal_plan(profile, schedule, 2, 2, **options)  # type: ignore[arg-type]
    devices = [
        each.model_copy(update={"node": node})
        for each, node in zip(cluster.devices, nodes or [0] * len(cluster.devices), strict=True)
    ]
    return ExportSubject(plan, profile, cluster.model_copy(update={"devices": tuple(devices)}), "plan.json")


def test_a_head_says_stages_prediction_and_notes() -> None:
    own = subject("interleaved")._replace(notes=("a note",))
    first, shape, predicted, note = heading(own, TARGETS["megatron"])
    assert first.startswith("model.py, planned by autopar. Written for Megatron-LM core 0.16.1: ")
    assert shape == (
        "stages: 4, 2 of them a device; replicas: 2; schedule: interleaved; micro-batches: 4 of 2; batch: 16"
    )
    assert f"step {own.plan.predicted.step_s:.4g} s" in predicted
    assert note == "a note"


def test_comments_are_folded_and_end_no_line_early() -> None:
    lines = comment(["word " * 60, "one\nrm -rf /"]).splitlines()
    assert all(line.startswith("#") for line in lines)
    assert max(map(len, lines)) <= 120
    assert lines[-1] == "# one rm -rf /"


def test_edges_are_those_of_blocks_where_only_these_have_names() -> None:
    own = subject()
    assert TARGETS["megatron"].edges(own) == (0, 1, 2, 3, 4, 5, 6, 7, 8)
    assert TARGETS["torch"].edges(own) == tuple(range(9))
    layers = [layer.model_copy(update={"modules": ("strange",)}) for layer in own.profile.layers]
    strange = own._replace(profile=own.profile.model_copy(update={"layers": tuple(layers)}))
    assert TARGETS["megatron"].edges(strange) == (0, 8)
    assert strange.blocks == ()


def test_depths_are_those_of_the_schedule_itself() -> None:
    assert usual_depths(subject().plan) == [(2, 1)]
    assert usual_depths(subject(division="round-robin").plan) == [(2, 1)]


def test_a_module_that_is_called_twice_has_no_name() -> None:
    own = subject()
    assert modules_of_stage(own, 0)[:2] == ("model.embed_tokens", "model.layers.0")
    last = own.profile.layers[-1].model_copy(update={"modules": ("lm_head@2",)})
    twice = own._replace(profile=own.profile.model_copy(update={"layers": (*own.profile.layers[:-1], last)}))
    with pytest.raises(UsageError, match="lm_head@2"):
        modules_of_stage(twice, 1)


def test_machines_are_counted_in_the_order_of_ranks() -> None:
    assert nodes_of(subject(nodes=(3, 3, 3, 1))) == [3, 1]
    assert equal_nodes(subject(nodes=(0, 0, 1, 1))) == (2, 2)
    with pytest.raises(UsageError, match="do not follow each other"):
        nodes_of(subject(nodes=(0, 1, 0, 1)))
