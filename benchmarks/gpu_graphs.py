"""The part of `benchmarks/gpu.py` that captures blocks, or a whole step, as CUDA graphs, beside the plain loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.capture.model.source import UserModel, load

__all__ = ["raced"]

WAYS = ("plain", "graphed blocks", "graphed step")


def raced(path: Path, micro_batches: int, rows: int, device: torch.device, steps: int) -> dict[str, Any]:
    """Return the seconds of a step by way, and how far their weights are apart in the end, relative.

    Without a GPU nothing is captured: all ways are plain loops.
    """
    user = load(str(path))
    made = {way: _Contestant(user, way, micro_batches, rows, device) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(steps):
        for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
            seconds[way].append(made[way].timed_step())
    weights = {way: [each.detach().double() for each in one.module.parameters()] for way, one in made.items()}
    apart = {
        way: max(
            float((a - b).abs().max() / (a.abs().max() + 1e-30)) for a, b in zip(weights["plain"], own, strict=True)
        )
        for way, own in weights.items()
    }
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    over = {way: each / medians["plain"] for way, each in medians.items()}
    return {"step_s": medians, "over_plain": over, "weights_apart": apart, "captured": device.type == "cuda"}


class _Contestant:
    """A model that is trained in one of the ways, on the same mini-batch again and again."""

    def __init__(self, user: UserModel, way: str, micro_batches: int, rows: int, device: torch.device) -> None:
        self.module = user.build(0).to(device).train()
        assert isinstance(self.module, nn.Sequential)
        self._device, self._user, self._micro_batches = device, user, micro_batches
        samples = user.dataset()
        columns = zip(*(samples[index] for index in range(micro_batches * rows)), strict=True)
        x, y = (torch.stack(column).to(device) for column in columns)
        self._batches = list(zip(x.split(rows), y.split(rows), strict=True))
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)
        self._step: Callable[[], object] = self._train
        self._forward: Callable[[torch.Tensor], torch.Tensor] = self.module
        for parameter in self.module.parameters():
            # Graphs add to gradients where they were captured.
            parameter.grad = torch.zeros_like(parameter)
        if device.type == "cuda" and way == "graphed blocks":
            self._capture_blocks()
        elif device.type == "cuda" and way == "graphed step":
            self._capture_step()

    def timed_step(self) -> float:
        """Train a step; return its seconds."""
        began = self._now()
        self._step()
        return self._now() - began

    def _train(self) -> None:
        self._optimizer.zero_grad(set_to_none=False)
        loss = self._user.loss
        assert loss is not None
        for x, y in self._batches:
            (loss(self._forward(x), (x, y)) / self._micro_batches).backward()
        self._optimizer.step()

    def _capture_blocks(self) -> None:
        """Capture forward and backward of every block; what it reads has a gradient, but for the first one's."""
        blocks, x = tuple(self.module), self._batches[0][0]
        examples = tuple((torch.randn_like(x).requires_grad_(at > 0),) for at in range(len(blocks)))
        before = {name: each.clone() for name, each in self.module.state_dict().items()}
        graphed = torch.cuda.make_graphed_callables(blocks, examples)
        self.module.load_state_dict(before)

        def forward(value: torch.Tensor) -> torch.Tensor:
            for block in graphed:
                value = block(value)
            return value

        self._forward = forward

    def _capture_step(self) -> None:
        """Capture all micro-batches and the update; the steps before the capture are undone."""
        before = {name: each.clone() for name, each in self.module.state_dict().items()}
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                self._train()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._train()
        self.module.load_state_dict(before)
        self._step = graph.replay

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
