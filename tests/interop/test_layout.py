"""Which layers are a model's blocks, under which names; and Megatron's layouts: their text there and back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.exports import export_plan
from autopar.formats.profile import Profile
from autopar.interop.layout import (
    GPT_LIKE,
    LLAMA_LIKE,
    family_of,
    fold,
    import_layout,
    modules_of,
    parts_of,
    rename,
    unfold,
)
from autopar.planner.constraints import parse
from equal_plans import llama_profile, random_equal, stops
from random_problems import gpt_profile, random_profile


def renamed(profile: Profile, modules: dict[int, tuple[str, ...]]) -> Profile:
    layers = [
        layer.model_copy(update={"modules": modules.get(index, layer.modules)})
        for index, layer in enumerate(profile.layers)
    ]
    return profile.model_copy(update={"layers": tuple(layers)})


def test_blocks_are_an_unbroken_run_of_elements_of_a_list() -> None:
    profile = llama_profile(5)
    parts = parts_of(profile)
    assert parts is not None
    assert (parts.before, parts.blocks, parts.behind) == (range(1), range(1, 6), range(6, 7))
    assert parts.blocks_list == "model.layers"
    assert list(modules_of(profile, parts.behind)) == ["model.norm", "lm_head"]


@pytest.mark.parametrize("modules", [("model.layers.3",), ("model.layers.2.attention",), ("other",)])
def test_a_run_with_a_gap_or_a_block_in_pieces_is_none(modules: tuple[str, ...]) -> None:
    assert parts_of(renamed(llama_profile(5), {3: modules})) is None


def test_a_family_is_known_by_its_class_and_its_names() -> None:
    assert family_of(llama_profile(), "LlamaForCausalLM") == LLAMA_LIKE
    assert family_of(llama_profile(), "GPT2LMHeadModel") is None
    assert family_of(llama_profile(), None) is None
    assert family_of(gpt_profile(), "LlamaForCausalLM") is None
    assert family_of(renamed(llama_profile(), {0: ("embed",)}), "LlamaForCausalLM") is None
    assert parts_of(random_profile(3)) is not None


def test_names_of_one_family_are_renamed_to_anothers() -> None:
    assert rename("model.layers.11", LLAMA_LIKE, GPT_LIKE) == "transformer.h.11"
    assert [rename(name, LLAMA_LIKE, GPT_LIKE) for name in ("model.embed_tokens", "model.norm", "lm_head")] == [
        "transformer.wte",
        "transformer.ln_f",
        "lm_head",
    ]


def plain(text: str) -> list[str]:
    """Return what a layout means, read from left to right, a character at a time."""
    text, found = text.replace(",", ""), ""
    while text:
        end = text.index(")") + 1 if text[0] == "(" else 1
        once, text = text[:end], text[end:]
        once = "|".join(plain(once[1:-1])) if end > 1 else once
        digits = len(text[1:]) - len(text[1:].lstrip("0123456789")) if text[:1] == "*" else 0
        found += once * int(text[1 : 1 + digits] or 1)
        text = text[1 + digits :] if digits else text
    return found.split("|")


def test_texts_mean_what_a_plain_reading_finds() -> None:
    for text in ("Et*7|(t*8|)*2t*9L", "Ettt|(tt|)*3,t|L", "E|(t|)*12tL", "EtL", "E|t|L", "E,t*3|(t*2|t|)*2tL"):
        assert unfold(text) == plain(text), text


def test_any_stages_fold_and_unfold() -> None:
    rng = random.Random(0)
    for _ in range(300):
        stages = ["t" * rng.randint(0, 4) for _ in range(rng.randint(1, 9))]
        stages.insert(rng.randrange(len(stages) + 1), "t" * rng.randint(1, 3))
        stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
        assert unfold(fold(stages)) == stages
        assert plain(fold(stages)) == stages


@pytest.mark.parametrize("text", ["", "tttL", "Ett", "EtmL", "Et*|L", "LtE", "EtE|tL", "(Et", "E(t*9999)*9999L", "EL"])
def test_what_is_no_layout_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(UsageError, match="layout") as error:
        unfold(text)
    assert "\n" not in str(error.value)


def test_200_random_plans_are_the_same_stages_after_export_and_import(tmp_path: Path) -> None:
    seen = set()
    for seed in range(200):
        plan, profile, cluster = random_equal(seed, ("1f1b", "interleaved"))
        text = export_plan("megatron", (plan, profile, cluster), tmp_path / "plan.json").text
        replicas, groups = plan.stages[0].replicas, len(plan.groups)
        if len(plan.stages) == 1:
            assert "--pipeline-model-parallel-layout" not in text
            continue
        layout = text.partition("--pipeline-model-parallel-layout ")[2].partition("\n")[0].strip("'")
        found = import_layout(layout, profile, replicas, groups)
        stages = parse(found.stages, [layer.name for layer in profile.layers])
        assert list(stages.cuts) == stops(plan)
        assert set(stages.widths) == {replicas}
        assert (found.schedule, found.chunks) == (plan.schedule, len(plan.groups[0]))
        seen.add((found.schedule, found.chunks, replicas, plan.stages[0].division))
    assert len(seen) >= 10


def test_a_layout_of_other_layers_or_devices_is_refused() -> None:
    profile = llama_profile(4)
    assert parts_of(profile) is not None
    for text, groups, words in (
        ("Ettt|L", None, "3 blocks, and the profile 4"),
        ("Ett|t|tL", 2, "2 devices do not divide the layout's 3 stages"),
        ("Ett||ttL", None, "stage 1 has no layers"),
    ):
        with pytest.raises(UsageError, match=words):
            import_layout(text, profile, 1, groups)
