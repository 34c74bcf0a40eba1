"""The part of `benchmarks/gpu.py` that profiles, plans and trains Transformers models, predicted beside measured."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

import autopar
from autopar.capture import load, named_tensors
from autopar.capture.model.batch import loss_outputs, model_arguments, rebuild
from autopar.formats.plan import Plan
from autopar.formats.profile import Precision, Profile
from autopar.formats.report import Report
from autopar.profiler.device import computing

__all__ = ["MODELS", "trained"]


class Model(NamedTuple):
    """A model by its configuration."""

    architecture: str
    fields: Mapping[str, Any]
    """Of the configuration, beside the architecture's defaults."""
    tiny: Mapping[str, Any]
    """Of a rehearsal, in place of ``fields``."""
    batch: int
    sequence: int | None


_NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "gpt2": Model("GPT2LMHeadModel", {}, {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128}, 16, 1024),
    "llama-1.2b": Model(
        "LlamaForCausalLM",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
        {**_NARROW, "num_key_value_heads": 1, "vocab_size": 128},
        8,
        1024,
    ),
    "vit-l": Model(
        "ViTForImageClassification",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        {**_NARROW, "image_size": 32, "patch_size": 16},
        64,
        None,
    ),
    "bert-large": Model(
        "BertForMaskedLM",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        {**_NARROW, "vocab_size": 128},
        16,
        512,
    ),
    "resnet-50": Model(
        "ResNetForImageClassification", {}, {"depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8}, 64, None
    ),
    "t5": Model(
        "T5ForConditionalGeneration",
        {"decoder_start_token_id": 0},
        {
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
            "vocab_size": 128,
            "decoder_start_token_id": 0,
        },
        32,
        512,
    ),
}
STEPS, BUDGET_S, WARM_UP = 20, 4.0, 3
LONGEST, NAME = 20, 100
TINY_BATCH, TINY_SEQUENCE = 4, 16


def trained(name: str, folder: Path, device: str, *, tiny: bool) -> dict[str, Any]:
    """Profile, plan for one device and train; return what was predicted beside what it took, by cause."""
    model = MODELS[name]
    config = {"architectures": [model.architecture], **(model.tiny if tiny else model.fields)}
    config["model_type"] = _type_of(model.architecture)
    (folder / "config.json").write_text(json.dumps(config))
    os.chdir(folder)
    sequence = None if model.sequence is None else TINY_SEQUENCE if tiny else model.sequence
    batch, precision = (TINY_BATCH, None) if tiny else (model.batch, "bf16")
    phases = _Phases()
    marks = [time.perf_counter()]
    asked: dict[str, Any] = {"sequence": sequence, "precision": precision, "device": device}
    profile = autopar.profile("hf:config.json", batch, budget_s=0.05 if tiny else BUDGET_S, progress=phases, **asked)
    marks.append(time.perf_counter())
    profile.save("profile.json")
    # The command's plan names the profile, which the run then predicts by.
    subprocess.run([sys.executable, "-m", "autopar", "plan", "--gpus", "1", "--quiet"], check=True)
    plan = Plan.load("plan.json")
    marks.append(time.perf_counter())
    ended_s: list[float] = []
    outcome = autopar.train(
        "plan.json", steps=3 if tiny else STEPS, progress=lambda step, loss: ended_s.append(time.perf_counter())
    )
    marks.append(time.perf_counter())
    took_s = (after - before for before, after in pairwise(marks))
    seconds: dict[str, Any] = dict(zip(("profile_s", "plan_s", "run_s"), took_s, strict=True))
    plain = _plain(plan, sequence, precision, torch.device(device), steps=2 if tiny else STEPS // 2)
    seconds["first_step_s"] = ended_s[0] - marks[2]
    seconds["phases_s"] = phases.seconds(marks[1])
    return {**seconds, **_queues(profile), **_figures(plan, outcome.report), **plain}


class _Phases:
    """A progress that knows how long each phase took; layers and sizes, which follow a colon, are of one phase."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, float]] = [("", time.perf_counter())]

    def __call__(self, what: str, share: float) -> None:
        name = what.partition(":")[0]
        if name != self._begun[-1][0]:
            self._begun.append((name, time.perf_counter()))
            # A part that is late leaves what it wrote.
            sys.stdout.write(f"{self._begun[-1][1] - self._begun[0][1]:.1f} s: {name}\n")
            sys.stdout.flush()

    def seconds(self, end_s: float) -> dict[str, float]:
        """Return the seconds of every phase, the last of which ended at a moment."""
        found: dict[str, float] = {}
        for (name, began_s), (_, ended_s) in pairwise([*self._begun, ("", end_s)]):
            found[name] = found.get(name, 0.0) + ended_s - began_s
        return found


def _type_of(architecture: str) -> str:
    import transformers

    return str(getattr(transformers, architecture).config_class.model_type)


def _queues(profile: Profile) -> dict[str, float]:
    """Return what all layers take at the largest micro-batch, the device's kernels and the host's launches apart."""
    costs = [layer.costs[-1] for layer in profile.layers]
    names = ("forward_s", "backward_s", "forward_launch_s", "backward_launch_s")
    return {f"profiled_{name}": sum(getattr(cost, name) or 0.0 for cost in costs) for name in names}


def _figures(plan: Plan, report: Report) -> dict[str, Any]:
    return {
        "micro_batches": plan.micro_batches,
        "predicted_step_s": report.predicted_step_s,
        "step_s": report.step_s.median,
        "predicted_over_measured": report.predicted_step_s / report.step_s.median,
        "bubble": report.bubble,
        "causes": [each.model_dump() for each in report.causes],
        "kinds": [each.model_dump() for each in report.kinds],
        "peak_bytes": list(report.peak_bytes),
        "predicted_peak_bytes": list(report.predicted_peak_bytes),
        "flops_utilisation": report.flops_utilisation,
        "notes": list(report.notes),
    }


def _plain(
    plan: Plan, sequence: int | None, precision: Precision | None, device: torch.device, steps: int
) -> dict[str, Any]:
    """Return the seconds of a step of the plain loop, in as many micro-batches, all on the device already, and of the
    kernels that take most of it."""
    user = load("hf:config.json", sequence=sequence)
    module = user.build(0).to(device).train()
    optimizer = user.make_optimizer(list(module.named_parameters()))
    rows, context = plan.micro_batch_size, computing(precision or "fp32", device)
    samples = user.dataset()
    batches = []
    for first in range(0, plan.batch, rows):
        batch = user.load_batch(samples, range(first, first + rows))
        batches.append(rebuild(batch, {name: each.to(device) for name, each in named_tensors(batch).items()}))

    def step() -> None:
        for batch in batches:
            positional, named = model_arguments(module, batch, user.loss is not None)
            with context():
                output = module(*positional, **named)
                outputs = loss_outputs(user.loss(output, batch) if user.loss else output, user.loss)
            # Of a sum and a count, the sum: its backward takes as long.
            (next(iter(outputs.values())) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {"plain_step_s": _seconds(step, device, steps), "plain_kernels_s": _kernels(step, device)}


def _kernels(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Return the seconds of the longest kernels of a step by name; of all operators, on the CPU."""
    with torch.profiler.profile() as profiler:
        step()
    on_gpu = device.type == "cuda"
    found = {
        each.key[:NAME]: (each.self_device_time_total if on_gpu else each.self_cpu_time_total) / 1e6
        for each in profiler.key_averages()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1])[:LONGEST])


def _seconds(step: Callable[[], None], device: torch.device, steps: int) -> float:
    times = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM_UP:])
