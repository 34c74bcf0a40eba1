"""Checking: what it costs to check a captured Transformers model, in its own training steps.

    python benchmarks/checking.py --json benchmarks/results/checking.json [--only gpt2 bert] [--output rows.jsonl]

One thread, a fresh process for every model, one at a time. A line for each: processor seconds of a training step of
eight samples, of preparing a profile beside building, exporting and cutting the model, and how many steps that is.
What ``--output`` holds already is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import Watch, loop_s

ROWS, MOST_STEPS = 8, 2.0
SMALL = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
SEVERAL_KEYS = {**SMALL, "num_key_value_heads": 4, "vocab_size": 8192}
CASES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "gpt2": ("GPT2LMHeadModel", {}, 512),
    "gpt2-short": ("GPT2LMHeadModel", {"n_layer": 6}, 128),
    "bert": ("BertForMaskedLM", {}, 128),
    "bert-classes": ("BertForSequenceClassification", {"num_hidden_layers": 4}, 64),
    "roberta": ("RobertaForMaskedLM", SMALL, 256),
    "distilbert": ("DistilBertForMaskedLM", {}, 128),
    "electra": ("ElectraForMaskedLM", SMALL, 256),
    "albert": ("AlbertForMaskedLM", SMALL, 128),
    "deberta": ("DebertaV2ForMaskedLM", {**SMALL, "vocab_size": 8192}, 128),
    "llama": ("LlamaForCausalLM", SEVERAL_KEYS, 512),
    "qwen2": ("Qwen2ForCausalLM", SEVERAL_KEYS, 256),
    "gemma": ("GemmaForCausalLM", {**SEVERAL_KEYS, "head_dim": 64}, 256),
    "mistral": ("MistralForCausalLM", {**SEVERAL_KEYS, "sliding_window": 128}, 512),
    "mixtral": ("MixtralForCausalLM", {**SEVERAL_KEYS, "num_local_experts": 4}, 256),
    "gpt-neox": ("GPTNeoXForCausalLM", {**SMALL, "vocab_size": 8192}, 256),
    "opt": ("OPTForCausalLM", {"num_hidden_layers": 6}, 128),
    "bloom": ("BloomForCausalLM", {"hidden_size": 512, "n_layer": 6, "vocab_size": 8192}, 256),
    "t5": ("T5ForConditionalGeneration", {"decoder_start_token_id": 0}, 128),
    "bart": ("BartForConditionalGeneration", {"encoder_layers": 4, "decoder_layers": 4, "d_model": 512}, 128),
    "vit": ("ViTForImageClassification", {}, None),
    "deit": ("DeiTForImageClassification", {"num_hidden_layers": 6}, None),
    "resnet": ("ResNetForImageClassification", {}, None),
    "convnext": ("ConvNextForImageClassification", {}, None),
    "swin": ("SwinForImageClassification", {}, None),
}


def measured(name: str) -> dict[str, float]:
    """Return the seconds of a model, in a process of its own."""
    command = [sys.executable, __file__, "--case", name]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str) -> dict[str, float]:
    """Return the seconds of a model."""
    import torch
    import transformers

    from autopar.capture.layers import export
    from autopar.capture.model.source import load
    from autopar.profiler import subject

    torch.set_num_threads(1)
    architecture, fields, length = CASES[name]
    config = getattr(transformers, architecture).config_class(**fields)
    config.architectures = [architecture]
    others: list[float] = []
    for module, function in ((subject, "_build"), (export, "export_rows"), (export, "_cut")):
        setattr(module, function, _timed(getattr(module, function), others))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        user = load(f"hf:{folder}", sequence=length)
        began = time.process_time()
        prepared = subject.prepare(user, subject.ProfileOptions(batch=ROWS, device="cpu"))
        checks_s = time.process_time() - began - sum(others)
    module, batch = prepared.module, user.load_batch(user.dataset(), range(ROWS))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    began = time.process_time()
    output: Any = module(**batch)
    output.loss.backward()
    optimizer.step()
    step_s = time.process_time() - began
    return {"step_s": step_s, "checks_s": checks_s, "others_s": sum(others), "steps": checks_s / step_s}


def _timed(function: Callable[..., Any], found: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        began = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            found.append(time.process_time() - began)

    return call


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=list(CASES), help="cases")
    parser.add_argument("--output", type=Path, help="a line a case; what it holds is kept")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help="measure one in this process")
    options = parser.parse_args()
    if options.case:
        sys.stdout.write(json.dumps(measure(options.case)) + "\n")
        return
    watch, rows = Watch(), {}
    if options.output and options.output.exists():
        rows = dict(json.loads(line) for line in options.output.read_text().splitlines())
    for name in options.only:
        if name not in rows:
            rows[name] = {key: round(value, 2) for key, value in measured(name).items()} | {"loop_s": loop_s()}
            sys.stderr.write(f"{name} {rows[name]}\n")
            if options.output:
                with options.output.open("a") as file:
                    file.write(json.dumps([name, rows[name]]) + "\n")
    steps = [row["steps"] for row in rows.values() if row["step_s"] >= 1]
    found = {"median_steps": statistics.median(steps), "most_steps": max(steps), "allowed": MOST_STEPS, "models": rows}
    watch.record(found, options.json)


if __name__ == "__main__":
    main()
