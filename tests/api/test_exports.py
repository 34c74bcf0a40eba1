"""Exports of plans: what every target's files say, and what is refused, in one line."""

import ast
import json
from pathlib import Path

import pytest

import autopar
from autopar.api.exports import TARGETS, configuration_of, export_plan
from autopar.errors import FileError, UsageError
from equal_plans import equal_plan, llama_profile, random_equal

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def folder_with_llama(folder: Path) -> Path:
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA))
    return folder / "plan.json"


def planned(schedule: str = "1f1b", groups: int = 2, **options: object):  # noqa: ANN201
    profile = llama_profile()
    model = profile.model.model_copy(update={"source": "hf:llama", "sequence": 128})
    profile = profile.model_copy(update={"model": model})
    plan, cluster = equal_plan(profile, schedule, groups, **options)  # type: ignore[arg-type]
    return plan, profile, cluster


def test_every_head_says_version_prediction_memory_and_bubble(tmp_path: Path) -> None:
    path = folder_with_llama(tmp_path)
    for name, target in TARGETS.items():
        inputs = planned(groups=1 if target.expressible and target.expressible.most_stages == 1 else 2)
        text = "".join(file.text for file in export_plan(name, inputs, path).files).replace("\n#  ", "")
        step = f"{inputs[0].predicted.step_s:.4g} s"
        for words in (target.version, target.trial, step, "peak memory", "bubble", "Written for"):
            assert words in text, (name, words)


def test_stages_of_torch_are_python_with_the_plans_cuts_and_name_files_from_where_they_are(tmp_path: Path) -> None:
    path = folder_with_llama(tmp_path)
    main, stages = export_plan("torch", planned("zb-v"), path).files
    assert (main.name, stages.name) == ("schedule.csv", "stages.py")
    found = (node for node in ast.parse(stages.text).body if isinstance(node, ast.Assign))
    values = {node.targets[0].id: node.value for node in found}  # type: ignore[attr-defined]
    assert ast.literal_eval(values["CUTS"]) == [0, 3, 7, 10, 14]
    assert ast.literal_eval(values["STAGES"]) == [[0, 3], [1, 2]]
    assert 'load("hf:" + str(FOLDER / "llama"), sequence=128)' in stages.text
    (tmp_path / "there").mkdir()
    made = export_plan("torch", planned(), path, tmp_path / "there" / "own.csv")
    assert 'FOLDER / "../llama"' in made.files[1].text
    assert 'FOLDER / "own.csv"' in made.files[1].text
    assert made.files[0].name == "own.csv"
    assert made.plan == planned()[0]


@pytest.mark.parametrize("nearest", [False, True])
def test_of_a_pipeline_without_flushes_the_remedy_is_one_that_helps(tmp_path: Path, nearest: bool) -> None:
    plan, *others = planned()
    inputs = (plan.model_copy(update={"weight_policy": "stash"}), *others)
    with pytest.raises(UsageError, match=r"never flushed \(policy stash\).*; plan with `policy='sync'`$"):
        export_plan("torch", inputs, folder_with_llama(tmp_path), nearest=nearest)  # type: ignore[arg-type]


def test_the_configuration_of_a_model_is_read_where_there_is_one(tmp_path: Path) -> None:
    plan, path = planned()[0], folder_with_llama(tmp_path)
    assert configuration_of(plan, path) == LLAMA
    own = plan.model.model_copy(update={"source": "gpt.py"})
    assert configuration_of(plan.model_copy(update={"model": own}), path) == {}
    (tmp_path / "llama" / "config.json").write_text("[]")
    with pytest.raises(FileError, match=r"config\.json: expected a JSON object"):
        configuration_of(plan, path)
    (tmp_path / "llama" / "config.json").unlink()
    with pytest.raises(FileError, match="no such"):
        configuration_of(plan, path)


def test_a_script_exports_what_it_has_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_with_llama(tmp_path)
    plan, profile, cluster = planned()
    made = autopar.export(autopar.Plan.of(plan, profile, cluster), "torch")
    assert made.text.startswith("0F0,0SEND_F0,")
    assert made.plan.predicted == plan.predicted


def test_the_nearest_of_what_is_refused_says_what_it_costs_and_of_what_is_not_is_that_itself(tmp_path: Path) -> None:
    path, refused = tmp_path / "plan.json", 0
    for seed in range(3):
        plan, profile, cluster = random_equal(seed)
        again = plan.stages[0].model_copy(update={"recompute": plan.stages[0].layers[-1:]})
        uneven = plan.model_copy(update={"stages": (again, *plan.stages[1:])})
        for name, target in TARGETS.items():
            if target.expressible is None:
                continue
            with pytest.raises(UsageError, match=f"cannot be exported to {name}: .*; `nearest=True` exports") as error:
                export_plan(name, (uneven, profile, cluster), path)
            assert "\n" not in str(error.value)
            made = export_plan(name, (uneven, profile, cluster), path, nearest=True)
            (note,) = made.notes
            more = made.plan.predicted.step_s / plan.predicted.step_s - 1
            assert f"{more * 100:+.1f} %: " in note
            assert note[:40] in made.files[-1].text or note[:40] in made.text
            refused += 1
    assert refused == 15
    made = export_plan("megatron", planned(), folder_with_llama(tmp_path), nearest=True)
    assert made.notes == ()
    assert made.plan.stages == planned()[0].stages
