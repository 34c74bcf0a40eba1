"""Reached: whether replicas that divide parameters make gradients of the same ones.

Layers of a captured graph do. Listed modules may decide while running, by what a replica's samples hold; then one
replica would reduce, or gather, what another one does not, and sums would be of different parameters, or never come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from autopar.errors import TrainingError
from autopar.ranks.failure import PeerLostError

__all__ = ["Reached"]

_GATHER, _REDUCE, _END = range(3)
_KINDS = 3
"""Of what a replica may come to next."""


class Reached:
    """Compares, among the replicas of a stage, what each is about to gather or reduce in a backward."""

    def __init__(
        self, units: Sequence[FSDPModule], names: Mapping[nn.Parameter, str], group: dist.ProcessGroup, *, gathers: bool
    ) -> None:
        """Come before what FSDP2 does in backwards.

        Args:
            units: FSDP2's, one a layer, and what holds them all.
            names: of their divided parameters.
            group: the process group of the replicas.
            gathers: whether parameters are gathered in backwards.
        """
        self._names, self._group, self._gathers = dict(names), group, gathers
        self._places = {name: place for place, name in enumerate(names.values())}
        for unit in units:
            for part in unit._get_fsdp_state()._fsdp_param_groups:
                self._precede(part)

    def end(self) -> None:
        """Say that this replica's backwards of a step are done."""
        self._compare([], _END)

    def _precede(self, part: Any) -> None:  # noqa: ANN401
        gather, reduce = part.pre_backward, part.post_backward
        names = [self._names[each.sharded_param] for each in part.fsdp_params]

        def before_gathering(*arguments: object) -> None:
            if self._gathers and part._training_state != TrainingState.PRE_BACKWARD:
                self._compare(names, _GATHER)
            gather(*arguments)

        def before_reducing(*arguments: object) -> None:
            found = [name for name, each in zip(names, part.fsdp_params, strict=True) if _is_reached(each)]
            if part.reduce_grads and found:
                self._compare(found, _REDUCE)
            reduce(*arguments)

        part.pre_backward, part.post_backward = before_gathering, before_reducing

    def _compare(self, mine: Sequence[str], what: int) -> None:
        """Tell the other replicas what comes next here, and of which parameters.

        Raises:
            TrainingError: something else comes next on another replica.
        """
        total = torch.zeros(len(self._places) + _KINDS)
        total[[self._places[name] for name in mine]] = 1.0
        total[len(self._places) + what] = 1.0
        try:
            dist.all_reduce(total, group=self._group)
        except RuntimeError as error:
            raise PeerLostError(str(error).splitlines()[0]) from error
        told = dict(zip(self._places, total.tolist(), strict=False))
        every = float(dist.get_world_size(self._group))
        if all(count in (0.0, every) for count in total.tolist()):
            return
        name = next((name for name, count in told.items() if count not in (0.0, every)), next(iter(told)))
        raise TrainingError(
            f"the backward of a micro-batch reaches {name} on some replicas of its stage and not on others, and they "
            "divide it; plan with `shard='none'`, or let every forward use it"
        )


def _is_reached(parameter: Any) -> bool:  # noqa: ANN401
    if not hasattr(parameter, "_unsharded_param"):
        return False
    return parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None
