"""The seven lines of the page for users of Trainer and accelerate train what their loop does."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import autopar
from page_blocks import read_page
from paths import ROOT

PAGE = ROOT / "docs" / "howto" / "trainer.md"


@pytest.mark.slow
def test_the_seven_lines_train_as_the_loop_that_they_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="autopar[hf] is not installed")
    files = {block.value: block.text for block in read_page(PAGE).blocks if block.mark == "file"}
    lines = [line for line in files["train.py"].splitlines() if line and "import" not in line]
    assert len(lines) == 7
    monkeypatch.chdir(tmp_path)
    net = ModuleType("net")
    exec(files["net.py"], vars(net))
    monkeypatch.setitem(sys.modules, "net", net)
    profile = autopar.profile(net.model, next(iter(net.loader)), optimizer=net.optimizer, budget_s=0.1, tensor=1)
    autopar.plan(profile, gpus=1, micro_batches=2).save("plan.json")
    entries: list[dict[str, Any]] = []
    found: dict[str, Any] = {"print": entries.append}
    exec(files["train.py"], found)

    # What accelerate does in one process.
    model = net.model.train()
    optimizer = net.optimizer(list(model.parameters()))
    schedule = net.scheduler(optimizer)
    steps, evaluated = [entry for entry in entries if "loss" in entry], entries[-1]
    for batch, entry in zip(net.loader, steps, strict=True):
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert entry["learning_rates"] == pytest.approx([group["lr"] for group in optimizer.param_groups], rel=1e-12)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert (entry["loss"], entry["gradient_norm"]) == pytest.approx((loss.item(), norm.item()), rel=1e-3)
    with torch.no_grad():
        expected = sum(model.eval()(**batch).loss.item() for batch in net.loader) / len(net.loader)
    assert found["validation"] == evaluated["evaluation"]["loss"] == pytest.approx(expected, rel=1e-3)
