"""Do the layers add up? The sum of profiled layers against whole plain PyTorch training steps.

    python benchmarks/layers.py --runs 12 --json benchmarks/results/layers.json

Plain training and profiling take turns in one process; a run is a profile between two stretches of plain steps, whose
means it is held against: gradients are forgotten, forward, backward, optimizer step. Prints and writes, per model, the
median and the spread (10th and 90th percentile) over the runs of profiled over plain seconds; the bytes that the layers
keep for the backward over those that the plain model's autograd keeps; and what measuring took, in seconds and in plain
steps. On a CUDA device also the most memory that a plain step allocates. Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean, median, quantiles

import torch
from machine import Watch

from autopar.capture import load, named_tensors
from autopar.capture.batch import StepModule
from autopar.formats.profile import Profile
from autopar.profiler import ProfileOptions, prepare
from autopar.profiler.activations import SavedStorages
from autopar.profiler.device import choose
from autopar.profiler.pinned import pinned
from autopar.profiler.profile import measured
from autopar.profiler.subject import Subject

MODELS = Path(__file__).parent / "models"
WARM_UP, STEPS = 2, 10


def main() -> None:
    arguments = _arguments()
    watch = Watch()
    rows = [_model(name, arguments) for name in arguments.models.split(",")]
    result = {"batch": arguments.batch, "runs": arguments.runs, **watch.describe(), "models": rows}
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if arguments.json:
        arguments.json.write_text(text + "\n")


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
    options = ProfileOptions(batch=arguments.batch, device=arguments.device)
    subject = prepare(load(str(path) if path.exists() else name), options)
    plain = _Plain(subject, options)
    ratios: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}
    measuring_s, spreads = [], []
    stretches = [plain.run()]
    for number in range(arguments.runs):
        started = time.perf_counter()
        profile = measured(subject, options)
        measuring_s.append(time.perf_counter() - started)
        spreads.append(profile.noise.median_spread)
        stretches.append(plain.run())
        for what, profiled_s in _sums(profile, options.batch).items():
            ratios[what].append(profiled_s / mean(stretch[what] for stretch in stretches[-2:]))
        sys.stderr.write(f"{name} {number + 1}: { ({what: round(each[-1], 3) for what, each in ratios.items()}) }\n")
    step_s = median(stretch["step"] for stretch in stretches)
    return {
        "model": name,
        "layers": len(profile.layers),
        "parameters_bytes": subject.parameter_bytes,
        "plain_step_s": round(step_s, 4),
        "profiled_over_plain": {what: _spread(each) for what, each in ratios.items()},
        "median_spread": round(median(spreads), 4),
        "saved_over_plain": round(_saved_bytes(profile, options.batch) / plain.saved_bytes(), 6),
        "measuring_s": round(median(measuring_s), 2),
        "measuring_in_plain_steps": round(median(measuring_s) / step_s, 1),
        **plain.memory(),
    }


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
        with pinned(self._options.threads):
            step, tensors = self._step()
            optimizer = self._subject.user.make_optimizer(module.parameters())
            times = [self._once(step, tensors, optimizer) for _ in range(WARM_UP + STEPS)][WARM_UP:]
            optimizer.zero_grad(set_to_none=True)
        forward_s, backward_s, step_s = (median(each) for each in zip(*times, strict=True))
        return {"forward": forward_s, "backward": backward_s, "step": step_s}

    def _step(self) -> tuple[StepModule, list[torch.Tensor]]:
        user = self._subject.user
        batch = user.load_batch(user.dataset(), range(self._options.batch))
        step = StepModule(self._subject.module, batch, user.loss)
        return step, [tensor.to(self._device) for tensor in named_tensors(batch).values()]

    def _once(
        self, step: StepModule, tensors: list[torch.Tensor], optimizer: torch.optim.Optimizer
    ) -> tuple[float, float, float]:
        marks = [self._now()]
        optimizer.zero_grad(set_to_none=True)
        marks.append(self._now())
        loss = step(*tensors)[0]
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
        step, tensors = self._step()
        module = self._subject.module
        storages = SavedStorages("model", (*module.parameters(), *module.buffers(), *tensors))
        with storages.recording():
            step(*tensors)
        return sum(storages.named({}, {}).values())

    def memory(self) -> dict[str, object]:
        """Return the most bytes that a step of the plain model allocates, where the device counts them."""
        if self._device.type != "cuda":
            return {}
        torch.cuda.reset_peak_memory_stats(self._device)
        self.run()
        return {"plain_peak_bytes": torch.cuda.max_memory_allocated(self._device)}


if __name__ == "__main__":
    main()
