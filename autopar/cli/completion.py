"""Completion: what a shell offers for the values of options."""

from __future__ import annotations

from collections.abc import Iterable


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def schedules(incomplete: str) -> list[str]:
    """Return the schedules that ``--schedule`` takes; torch's names where one is begun.

    >>> schedules("zb"), schedules("Inter")
    (['zb-h1', 'zb-h2', 'zb-v'], ['Interleaved1F1B'])
    """
    from autopar.schedules import SCHEDULES
    from autopar.schedules.spelling import TORCH_NAMES

    return _beginning(incomplete, ("auto", *SCHEDULES)) or _beginning(incomplete, TORCH_NAMES)


def shards(incomplete: str) -> list[str]:
    """Return what replicas may divide."""
    from typing import get_args

    from autopar.formats.plan import Shard

    return _beginning(incomplete, ("auto", *get_args(Shard)))


def objectives(incomplete: str) -> list[str]:
    """Return what a plan may be best at."""
    from typing import get_args

    from autopar.planner.options import Objective

    return _beginning(incomplete, get_args(Objective))


def solvers(incomplete: str) -> list[str]:
    """Return how plans are searched."""
    return _beginning(incomplete, ("dp", "milp"))


def recomputations(incomplete: str) -> list[str]:
    """Return which layers may run forward again."""
    return _beginning(incomplete, ("auto", "none", "full"))


def clusters(incomplete: str) -> list[str]:
    """Return names of clusters; a shell offers files where none begins so."""
    from autopar.hardware.clusters import EXAMPLES

    return _beginning(incomplete, EXAMPLES) if incomplete else []


def devices(incomplete: str) -> list[str]:
    """Return what ``profile --device`` takes."""
    from autopar.hardware.gpus import GPUS

    return _beginning(incomplete, ("auto", "cpu", "cuda", *(gpu.name for gpu in GPUS)))


def formats(incomplete: str) -> list[str]:
    """Return what `autopar import` reads."""
    return _beginning(incomplete, ("pipedream", "piper", "profiles"))
