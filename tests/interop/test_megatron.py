"""Megatron-LM's arguments; and its layouts: their texts against a plain reading, and plans there and back."""

import random
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.interop.megatron import fold, import_layout, unfold
from autopar.interop.target import parts_of
from autopar.planner.dictated import parse
from equal_plans import exported, llama_profile, planned, random_equal, stops


def test_megatron_says_recomputation_and_precision_and_has_no_name_for_cuts_around_the_blocks(tmp_path: Path) -> None:
    def text(**options: object) -> str:
        return exported("megatron", tmp_path, planned(llama_profile(), "1f1b", 2, 2, **options))[0]

    assert "recompute" not in text()
    assert "--recompute-method block --recompute-num-layers 2" in text(recompute=(1, 2, 7, 8))
    assert "--recompute-method uniform --recompute-num-layers 1" in text(recompute=range(1, 13))
    sharded = text(shard="optimizer", micro_batches=4)
    for line in ("--use-distributed-optimizer", "--micro-batch-size 2", "--global-batch-size 16", "--num-layers 12"):
        assert f"    {line}\n" in sharded
    with pytest.raises(UsageError, match="no replicas of a pipeline's stages that divide parameters"):
        text(shard="parameters")
    profile = llama_profile(3)
    names, tensor = ("model.norm", "lm_head"), profile.tensors[-1]
    ends = [profile.layers[-1].model_copy(update={"name": name, "modules": (name,)}) for name in names]
    last = tensor.model_copy(update={"name": "last", "producer": names[0], "consumers": names[1:]})
    tensors = (*profile.tensors[:-1], tensor.model_copy(update={"consumers": names[:1]}), last)
    profile = profile.model_copy(update={"layers": (*profile.layers[:-1], *ends), "tensors": tensors})
    with pytest.raises(UsageError, match="stage 0 ends within the layers around the blocks"):
        exported("megatron", tmp_path, planned(profile, "1f1b", 2, cuts=(5,)))
    (text,) = exported("megatron", tmp_path, planned(profile, "1f1b", 2, cuts=(4,)))
    assert "--pipeline-model-parallel-layout 'Et*3|L'" in text


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


def test_layouts_mean_what_a_plain_reading_finds_and_others_are_refused() -> None:
    for text in ("Et*7|(t*8|)*2t*9L", "Ettt|(tt|)*3,t|L", "E|(t|)*12tL", "EtL", "E|t|L", "E,t*3|(t*2|t|)*2tL"):
        assert unfold(text) == plain(text), text
    rng = random.Random(0)
    for _ in range(100):
        stages = ["t" * rng.randint(0, 4) for _ in range(rng.randint(1, 9))]
        stages.insert(rng.randrange(len(stages) + 1), "t" * rng.randint(1, 3))
        stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
        assert unfold(fold(stages)) == stages
        assert plain(fold(stages)) == stages
    profile = llama_profile(4)
    assert parts_of(profile) is not None
    three = {"stages": "0:1,1:1,2:1,3:1,4:1,5:1", "schedule": "interleaved", "chunks": 3}
    assert import_layout("E|t|t|t|t|L", profile, 1, 2).options == three
    for text, groups, words in (
        ("Ettt|L", None, "3 blocks, and the profile 4"),
        ("Ett|t|tL", 2, "2 devices do not divide the layout's 3 stages"),
        ("Ett||ttL", None, "stage 1 has no layers"),
    ):
        with pytest.raises(UsageError, match=words):
            import_layout(text, profile, 1, groups)


HUGE = "Et*9999|(t*9999|)*9999L" * 300
"""In ten thousand letters, of ten thousand times as many."""


@pytest.mark.parametrize(
    "text", ["", "tttL", "Ett", "EtmL", "Et*|L", "LtE", "EtE|tL", "(Et", "E(t*9999)*9999L", "EL", HUGE]
)
def test_what_is_no_layout_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(UsageError, match="layout") as error:
        unfold(text)
    assert "\n" not in str(error.value)


def test_random_plans_are_the_same_stages_after_export_and_import(tmp_path: Path) -> None:
    seen = set()
    for seed in range(50):
        plan, profile, cluster = random_equal(seed, ("1f1b", "interleaved"))
        (text,) = exported("megatron", tmp_path, (plan, profile, cluster))
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
