"""Parts of models: blocks, what stands around them, and what families call them."""

from __future__ import annotations

import pytest

from autopar.formats.profile import Profile
from autopar.interop.names import GPT_LIKE, LLAMA_LIKE, family_of, modules_of, parts_of, rename
from equal_plans import llama_profile
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
