"""What rank processes gather and scatter of a layer that they divide."""

from typing import Any

import torch
import torch.distributed as dist

from autopar.profiler.operations import Operation, Pace, gathering, scattering, time_operation
from autopar.ranks.context import RankContext


def moved(context: RankContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of what is gathered and scattered by one call of each, their seconds, and those of rounds."""
    seen: list[tuple[str, int]] = []
    for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, _noting(name.rsplit("_", 1)[0], getattr(dist, name), seen))
    group = dist.new_group(list(range(context.size)))
    gather, scatter = (make(arguments["bytes"], group) for make in (gathering, scattering))
    scatter()
    calls: dict[str, Any] = {}
    for name, call in {"gather": gather, "scatter": scatter}.items():
        seen.clear()
        calls[name] = {"seconds": [call(), call()], "seen": list(seen)}
    ranks = tuple(range(context.size))
    pace = Pace(warm_up=1, iterations=2, budget_s=0.0, least=2)
    for kind in ("all_gather", "reduce_scatter"):
        calls[kind] = time_operation(Operation(context, kind, ranks, group), [64, arguments["bytes"]], pace)
    return calls


def _noting(name: str, call: Any, seen: list[tuple[str, int]]) -> Any:  # noqa: ANN401
    def noting(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        tensors = [each for each in (*arguments, *options.values()) if isinstance(each, torch.Tensor)]
        seen.append((name, max(tensor.numel() for tensor in tensors)))
        return call(*arguments, **options)

    return noting
