"""Do the layers add up? The sum of profiled layers against whole plain PyTorch training steps.

    python benchmarks/layers.py --runs 12 --json benchmarks/results/layers.json

Plain training and profiling take turns, each in a process of its own, as a user would run them; a run is a profile
between two stretches of plain steps, whose means it is held against: gradients are forgotten, forward, backward,
optimizer step. Prints and writes, per model, the median and the spread (10th and 90th percentile) over the runs of
profiled over plain seconds; the bytes that the layers keep for the backward over those that the plain model's autograd
keeps; what measuring took, in seconds and in plain steps; and which of these are within the bounds that autopar
promises. On a CUDA device also the most memory that a plain step allocates. Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch

from autopar.capture import load, named_tensors
from autopar.capture.model.batch import loss_outputs, model_arguments, rebuild
from autopar.formats.profile import Profile
from autopar.options.profile import ProfileOptions
from autopar.profiler import prepare
from autopar.profiler.device import choose, pin_threads
from autopar.profiler.layer_runs import SavedStorages
from autopar.profiler.profile import measure_layers
from autopar.profiler.subject import Subject
from machine import Watch

MODELS = Path(__file__).parent / "models"
WARM_UP, STEPS = 2, 10
BOUNDS = {"forward": 0.05, "backward": 0.07, "step": 0.05}
SAVED_BOUND = 0.001


def main() -> None:
    arguments = _arguments()
    watch = Watch()
    rows = [_model(name, arguments) for name in arguments.models.split(",")]
    watch.record({"batch": arguments.batch, "runs": arguments.runs, "models": rows}, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="gpt2,bert,resnet", help="names in benchmarks/models, or model files")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _model(name: str, arguments: argparse.Namespace) -> dict[str, object]:
    path = MODELS / f"{name}.py"
    asked = str(path) if path.exists() else name, ProfileOptions(batch=arguments.batch, device=arguments.device)
    spawn = get_context("spawn")
    ratios: dict[str, list[float]] = {what: [] for what in BOUNDS}
    profiles: list[dict[str, Any]] = []
    with ProcessPoolExecutor(1, spawn) as profiler, ProcessPoolExecutor(1, spawn) as trainer:
        stretches = [trainer.submit(_trained, *asked).result()]
        for number in range(arguments.runs):
            profiles.append(profiler.submit(_profiled, *asked).result())
            stretches.append(trainer.submit(_trained, *asked).result())
            for what, each in ratios.items():
                each.append(profiles[-1][what] / mean(stretch[what] for stretch in stretches[-2:]))
            sys.stderr.write(
                f"{name} {number + 1}: { ({what: round(each[-1], 3) for what, each in ratios.items()}) }\n"
            )
        plain = trainer.submit(_memory, *asked).result()
    spreads = {what: _spread(each) for what, each in ratios.items()}
    step_s = median(stretch["step"] for stretch in stretches)
    measuring_s = median(each["measuring_s"] for each in profiles)
    saved = profiles[-1]["saved_bytes"] / plain.pop("saved_bytes")
    within = {what: abs(spreads[what]["median"] - 1) <= bound for what, bound in BOUNDS.items()}
    return {
        "model": name,
        "layers": profiles[-1]["layers"],
        **plain,
        "plain_step_s": round(step_s, 4),
        "profiled_over_plain": spreads,
        "median_spread": round(median(each["median_spread"] for each in profiles), 4),
        "saved_over_plain": round(saved, 6),
        "measuring_s": round(measuring_s, 2),
        "measuring_in_plain_steps": round(measuring_s / step_s, 1),
        "within_bounds": within | {"saved": abs(saved - 1) <= SAVED_BOUND},
    }


@cache
def _subject(spec: str, options: ProfileOptions) -> Subject:
    """Return what this process profiles or trains, captured once."""
    return prepare(load(spec), options)


def _profiled(spec: str, options: ProfileOptions) -> dict[str, Any]:
    """Profile once; return sums over the layers, in seconds and bytes."""
    subject = _subject(spec, options)
    started = time.perf_counter()
    profile = measure_layers(subject, options)
    return {
        **_sums(profile, options.batch),
        "saved_bytes": _saved_bytes(profile, options.batch),
        "layers": len(profile.layers),
        "median_spread": profile.noise.median_spread,
        "measuring_s": time.perf_counter() - started,
    }


@cache
def _plain(spec: str, options: ProfileOptions) -> _Plain:
    return _Plain(_subject(spec, options), options)


def _trained(spec: str, options: ProfileOptions) -> dict[str, float]:
    return _plain(spec, options).run()


def _memory(spec: str, options: ProfileOptions) -> dict[str, Any]:
    plain = _plain(spec, options)
    parameters_bytes = sum(each.nbytes for each in _subject(spec, options).module.parameters())
    return {"parameters_bytes": parameters_bytes, "saved_bytes": plain.saved_bytes(), **plain.memory()}


def _spread(values: list[float]) -> dict[str, float]:
    low, *_, high = quantiles(values, n=10, method="inclusive") if len(values) > 1 else (values[0], values[0])
    return {"median": round(median(values), 4), "p10": round(low, 4), "p90": round(high, 4)}


def _sums(profile: Profile, batch: int) -> dict[str, float]:
    costs = [next(cost for cost in layer.costs if cost.micro_batch == batch) for layer in profile.layers]
    forward_s, backward_s = sum(cost.forward_s for cost in costs), sum(cost.backward_s for cost in costs)
    update_s = sum(layer.update_s for layer in profile.layers)
    return {"forward": forward_s, "backward": backward_s, "step": forward_s + backward_s + update_s}


def _saved_bytes(profile: Profile, batch: int) -> int:
    """The union by storage, without the model's inputs, which are there anyhow."""
    storages = {
        saved.storage: saved.bytes
        for layer in profile.layers
        for cost in layer.costs
        if cost.micro_batch == batch
        for saved in cost.saved
    }
    return sum(size for storage, size in storages.items() if not storage.startswith("batch."))


class _Plain:
    """The plain model, trained as anyone would; its weights are the ones that are profiled, and change meanwhile."""

    def __init__(self, subject: Subject, options: ProfileOptions) -> None:
        self._subject, self._options = subject, options
        self._device = choose(options.device)

    def run(self) -> dict[str, float]:
        """Return the medians of some steps' seconds."""
        module = self._subject.module.to(self._device).train()
        with pin_threads(self._options.threads):
            batch = self._batch()
            optimizer = self._subject.user.make_optimizer(module.named_parameters())
            times = [self._once(batch, optimizer) for _ in range(WARM_UP + STEPS)][WARM_UP:]
            optimizer.zero_grad(set_to_none=True)
        forward_s, backward_s, step_s = (median(each) for each in zip(*times, strict=True))
        return {"forward": forward_s, "backward": backward_s, "step": step_s}

    def _batch(self) -> object:
        user = self._subject.user
        batch = user.load_batch(user.dataset(), range(self._options.batch))
        return rebuild(batch, {name: tensor.to(self._device) for name, tensor in named_tensors(batch).items()})

    def _loss(self, batch: object) -> torch.Tensor:
        model, loss = self._subject.module, self._subject.user.loss
        positional, named = model_arguments(model, batch, loss is not None)
        output = model(*positional, **named)
        return next(iter(loss_outputs(loss(output, batch) if loss else output, loss).values()))

    def _once(self, batch: object, optimizer: torch.optim.Optimizer) -> tuple[float, float, float]:
        marks = [self._now()]
        optimizer.zero_grad(set_to_none=True)
        marks.append(self._now())
        loss = self._loss(batch)
        marks.append(self._now())
        loss.backward()
        marks.append(self._now())
        optimizer.step()
        marks.append(self._now())
        return marks[2] - marks[1], marks[3] - marks[2], marks[4] - marks[0]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def saved_bytes(self) -> int:
        """Return the bytes that one forward of the plain model keeps, each storage once, without the inputs."""
        batch, module = self._batch(), self._subject.module
        storages = SavedStorages("model", (*module.parameters(), *module.buffers(), *named_tensors(batch).values()))
        with storages.recording():
            self._loss(batch)
        return sum(storages.bytes_by_name({}, {}).values())

    def memory(self) -> dict[str, object]:
        """Return the most bytes that a step of the plain model allocates, where the device counts them."""
        if self._device.type != "cuda":
            return {}
        torch.cuda.reset_peak_memory_stats(self._device)
        self.run()
        return {"plain_peak_bytes": torch.cuda.max_memory_allocated(self._device)}


if __name__ == "__main__":
    main()
