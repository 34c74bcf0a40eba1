"""What all exports share: blocks and their names, heads, comments, stages' modules, machines in the order of ranks."""

from collections.abc import Sequence

import pytest

from autopar.api.exports import TARGETS
from autopar.errors import UsageError
from autopar.formats.profile import Profile
from autopar.interop import target
from equal_plans import equal_plan, llama_profile
from random_problems import gpt_profile, random_profile


def subject(schedule: str = "1f1b", nodes: Sequence[int] | None = None, **options: object) -> target.ExportSubject:
    profile = llama_profile(6)
    plan, cluster = equal_plan(profile, schedule, 2, 2, **options)  # type: ignore[arg-type]
    places = nodes or [0] * len(cluster.devices)
    devices = [each.model_copy(update={"node": node}) for each, node in zip(cluster.devices, places, strict=True)]
    return target.ExportSubject(plan, profile, cluster.model_copy(update={"devices": tuple(devices)}), "plan.json")


def test_heads_say_stages_and_families_are_known_by_class_and_names() -> None:
    own = subject("interleaved")._replace(notes=("a note",))
    first, form, predicted, note = target.heading(own, TARGETS["megatron"])
    assert first.startswith("model.py, planned by autopar. Written for Megatron-LM core 0.16.1: ")
    assert form == "stages: 4, 2 of them a device; replicas: 2; schedule: interleaved; micro-batches: 4 of 2; batch: 16"
    assert f"step {own.plan.predicted.step_s:.4g} s" in predicted
    assert note == "a note"
    lines = target.comment(["word " * 60, "one\nrm -rf /"]).splitlines()
    assert all(line.startswith("#") for line in lines)
    assert max(map(len, lines)) <= 120
    assert lines[-1] == "# one rm -rf /"
    assert target.family_of(llama_profile(), "LlamaForCausalLM") == target.LLAMA_LIKE
    assert target.family_of(llama_profile(), "GPT2LMHeadModel") is None
    assert target.family_of(llama_profile(), None) is None
    assert target.family_of(gpt_profile(), "LlamaForCausalLM") is None
    assert target.family_of(renamed(llama_profile(), {0: ("embed",)}), "LlamaForCausalLM") is None
    assert target.parts_of(random_profile(3)) is not None
    ours = target.LLAMA_LIKE, target.GPT_LIKE
    names = ("model.layers.11", "model.embed_tokens", "model.norm", "lm_head")
    found = [target.rename(name, *ours) for name in names]
    assert found == ["transformer.h.11", "transformer.wte", "transformer.ln_f", "lm_head"]


def test_machines_edges_and_depths_are_those_of_ranks_blocks_and_the_schedule() -> None:
    assert target.nodes_of(subject(nodes=(3, 3, 3, 1))) == [3, 1]
    assert target.equal_nodes(subject(nodes=(0, 0, 1, 1))) == (2, 2)
    assert target.nodes_of(subject(nodes=(0, 1, 0, 1))) == [2, 2]
    heads = [target.heading(subject(nodes=nodes), TARGETS["torch"])[-1] for nodes in ((5, 5, 2, 2), (0, 1, 1, 1))]
    assert heads == [
        "hosts, in the order of ranks: 2 x cpu (node 5), 2 x cpu (node 2)",
        "hosts, in the order of ranks: 1 x cpu (node 0), 3 x cpu (node 1)",
    ]
    assert target.heading(subject(), TARGETS["torch"])[-1].startswith("predicted: ")
    with pytest.raises(UsageError, match="machines have 3, 1 ranks"):
        target.equal_nodes(subject(nodes=(3, 3, 3, 1)))
    own = subject()
    assert target.modules_of_stage(own, 0)[:2] == ("model.embed_tokens", "model.layers.0")
    with pytest.raises(UsageError, match="lm_head@2"):
        target.modules_of_stage(own._replace(profile=renamed(own.profile, {7: ("lm_head@2",)})), 1)
    own = subject()
    assert TARGETS["megatron"].edges(own) == (0, 1, 2, 3, 4, 5, 6, 7, 8)
    assert TARGETS["torch"].edges(own) == tuple(range(9))
    strange = own._replace(profile=renamed(own.profile, dict.fromkeys(range(8), ("strange",))))
    assert TARGETS["megatron"].edges(strange) == (0, 8)
    assert strange.blocks == ()
    # The first stage has four layers.
    for before, behind, words in ((5, 7, "stage 0"), (4, 7, "None"), (1, 4, "None"), (1, 3, "stage 0")):
        parts = target.ModelParts(range(before), range(before, behind), range(behind, 8), "model.layers")
        assert str(target.ends_refusal(own.plan, parts)).startswith(words)
    assert target.usual_depths(subject().plan) == [(2, 1)]
    assert target.usual_depths(subject(division="round-robin").plan) == [(2, 1)]


def renamed(profile: Profile, modules: dict[int, tuple[str, ...]]) -> Profile:
    layers = [one.model_copy(update={"modules": modules.get(at, one.modules)}) for at, one in enumerate(profile.layers)]
    return profile.model_copy(update={"layers": tuple(layers)})


def test_blocks_are_an_unbroken_run_of_elements_of_a_list_none_of_them_in_pieces() -> None:
    profile = llama_profile(5)
    parts = target.parts_of(profile)
    assert parts is not None
    assert (parts.before, parts.blocks, parts.behind) == (range(1), range(1, 6), range(6, 7))
    assert parts.blocks_list == "model.layers"
    assert list(target.modules_of(profile, parts.behind)) == ["model.norm", "lm_head"]
    # Of two lists the longer one counts, wherever it stands.
    two = target.parts_of(renamed(profile, {0: ("encoder.0",)}))
    assert two is not None
    assert two.blocks_list == "model.layers"
    for name in ("model.layers.3", "model.layers.2.attention", "other"):
        assert target.parts_of(renamed(profile, {3: (name,)})) is None
