"""Sizes: whether batches differ in other sizes than their number of samples, and a collate that pads them to one.

    tokens of 7 in one batch and of 19 in another -> refused, with `def collate(samples, own=collate): ...` to paste

Tensors between stages have one size for a whole run. Batches of a few samples each, spread over the dataset, are looked
at. Where they differ, all samples are read, for a while, to find the largest sizes; what a collate of the file's own
pads with is seen where a sample has become longer beside another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from autopar.errors import ModelError

TOGETHER, BATCHES = 2, 16
"""Samples of a batch that is looked at, and how many batches."""
_READING_S = 5.0
"""How long samples are read to find the largest."""
_LEFT_OUT = -100
"""The label that torch's losses leave out."""
_LABELS = ("label", "labels", "target", "targets", "y")

_Sizes = dict[str, tuple[int, ...]]
"""Of one sample, by the names of tensors."""
_Read = Callable[[int], object]
_Collate = Callable[[Sequence[object]], object]


def check_sizes(file: str, count: int, read: _Read, collate: _Collate | None) -> None:
    """Look at batches of a dataset.

    Args:
        file: that is to blame.
        count: samples in the dataset.
        read: returns a sample by its index.
        collate: the file's own; None where samples are stacked.

    Raises:
        ModelError: batches differ in size; says what to paste.
    """
    spread = {place * (count - 1) // (BATCHES - 1) for place in range(BATCHES)} if count else set()
    groups = [[min(first + place, count - 1) for place in range(TOGETHER)] for first in sorted(spread)]
    seen: dict[int, object] = {index: read(index) for index in sorted({index for group in groups for index in group})}
    found = [(group, _sizes_of([seen[index] for index in group], collate)) for group in groups]
    if any(sizes is None for _, sizes in found):
        # What is wrong with it is said where it is used.
        return
    known = [(group, sizes) for group, sizes in found if sizes is not None]
    for group, sizes in known[1:]:
        (first, before) = known[0]
        if sizes != before:
            name = next((name for name in {**before, **sizes} if before.get(name) != sizes.get(name)), "")
            raise ModelError(
                f"{file}: batches differ in size: {name} has {before.get(name)} a sample where it is of samples "
                f"{first}, and {sizes.get(name)} where it is of {group}, and stages exchange tensors of one size"
                f"{_remedy(count, read, collate, seen)}"
            )


def _sizes_of(samples: Sequence[object], collate: _Collate | None) -> _Sizes | None:
    """Return the sizes that a batch has; of samples that are stacked, those of each, which may differ."""
    if collate is None:
        every = [
            {name: tuple(each.shape) for name, each in tensors_by_path(sample, "batch").items()} for sample in samples
        ]
        # Two that differ are as good as two batches that do.
        return next((sizes for sizes in every if sizes != every[0]), every[0])
    try:
        return {name: tuple(each.shape[1:]) for name, each in tensors_by_path(collate(samples), "batch").items()}
    except Exception:
        return None


def tensors_by_path(value: object, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors in a value of mappings, tuples and lists, by path below another."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    sequence = value if isinstance(value, (tuple, list)) else ()
    items = list(value.items() if isinstance(value, Mapping) else enumerate(sequence))
    prefix = f"{path}." if path else ""
    return {name: each for key, item in items for name, each in tensors_by_path(item, f"{prefix}{key}").items()}


def _remedy(count: int, read: _Read, collate: _Collate | None, seen: Mapping[int, object]) -> str:
    """Return a collate that pads every tensor to the largest size, where it is clear what is padded with."""
    until_s, largest = time.monotonic() + _READING_S, _Sizes()
    number = 0
    for index in [*seen, *(index for index in range(count) if index not in seen)]:
        number += 1
        for name, sizes in (_sizes_of([seen[index] if index in seen else read(index)], collate) or {}).items():
            before = largest.get(name, sizes)
            if len(before) != len(sizes):
                return "; let collate() give tensors of one size"
            largest[name] = tuple(map(max, before, sizes))
        if time.monotonic() > until_s:
            break
    template = next(iter(seen.values())) if collate is None else collate([next(iter(seen.values()))])
    varying = _varying(list(seen.values()), collate)
    values = {name: _padding(name, template, list(seen.values()), collate) for name in varying}
    if any(value is None for value in values.values()):
        return "; let collate() pad every tensor to one size"
    offset = 0 if collate is None else 1
    known = {name: (largest[name], varying[name], values[name], offset) for name in varying}
    read_all = "" if number >= count else f" (of the first {number} samples that were read)"
    if collate is None:
        made = _expression(template, "s", "batch", known)
        body = f"return torch.utils.data.default_collate([{made} for s in samples])"
        head = "def collate(samples)"
    else:
        body, head = (
            f"b = own(samples); return {_expression(template, 'b', 'batch', known)}",
            ("def collate(samples, own=collate)"),
        )
    return (
        f"; pad to the largest{read_all}, below everything else in the file: "
        f"`{head}: pad = torch.nn.functional.pad; {body}`"
    )


def _varying(samples: Sequence[object], collate: _Collate | None) -> dict[str, list[int]]:
    """Return which dimensions of a sample's tensors differ, by name."""
    every = [sizes for sizes in (_sizes_of([sample], collate) for sample in samples) if sizes is not None]
    found = {}
    for name, first in every[0].items():
        dims = [dim for dim in range(len(first)) if len({sizes[name][dim] for sizes in every if name in sizes}) > 1]
        if dims:
            found[name] = dims
    return found


def _padding(name: str, template: object, samples: Sequence[object], collate: _Collate | None) -> float | None:
    """Return what the file's own collate pads a tensor with; of stacked samples, what is usual."""
    if collate is None:
        tensor = tensors_by_path(template, "batch")[name]
        integer = not tensor.is_floating_point() and tensor.dtype is not torch.bool
        last = isinstance(template, (tuple, list)) and name == f"batch.{len(template) - 1}"
        return _LEFT_OUT if integer and (last or name.rpartition(".")[2] in _LABELS) else 0
    found: set[float] = set()
    for one, other in pairwise(samples):
        single, both = (tensors_by_path(collate(rows), "batch")[name] for rows in ([one], [one, other]))
        inside = torch.zeros_like(both[0], dtype=torch.bool)
        inside[tuple(slice(0, size) for size in single.shape[1:])] = True
        found.update(both[0][~inside].double().tolist())
    return found.pop() if len(found) == 1 else None


def _expression(template: object, text: str, name: str, known: Mapping[str, Any]) -> str:
    """Return Python for a batch, or a sample, of the template's structure whose tensors are padded."""
    if isinstance(template, Mapping):
        items = (
            f"{key!r}: {_expression(item, f'{text}[{key!r}]', f'{name}.{key}', known)}"
            for key, item in template.items()
        )
        return f"{{{', '.join(items)}}}"
    if isinstance(template, (tuple, list)):
        items = (_expression(item, f"{text}[{at}]", f"{name}.{at}", known) for at, item in enumerate(template))
        return f"({', '.join(items)},)"
    if name not in known:
        return text
    largest, dims, value, offset = known[name]
    # Those of torch's pad, from the last dimension on.
    amounts = [
        f"0, max(0, {largest[dim]} - {text}.shape[{dim + offset}])" if dim in dims else "0, 0"
        for dim in range(len(largest) - 1, min(dims) - 1, -1)
    ]
    shown = int(value) if float(value).is_integer() else value
    return f"pad({text}, ({', '.join(amounts)}), value={shown})"
