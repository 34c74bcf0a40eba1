"""LayerCosts: what was measured of the layers, at any number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from autopar.formats.document import Provenance, least_certain
from autopar.formats.profile import Cost, Layer


def at_rows(sizes: Sequence[int], values: Sequence[float], rows: float) -> float:
    """Return a cost at ``rows`` samples from its values at measured, ascending sizes.

    Exact at a measured size and linear between two; outside them the least-squares line with a slope of at least
    0, and never less than 0. One measured size scales in proportion.

    >>> at_rows((2, 4), (1.0, 2.0), 3), at_rows((2, 4), (1.0, 2.0), 8), at_rows((2, 4), (3.0, 2.0), 8)
    (1.5, 4.0, 2.5)
    """
    if len(sizes) == 1:
        return values[0] * rows / sizes[0]
    if rows < sizes[0] or rows > sizes[-1]:
        mean_size, mean_value = sum(sizes) / len(sizes), sum(values) / len(values)
        spread = sum((size - mean_size) ** 2 for size in sizes)
        covariance = sum((size - mean_size) * (value - mean_value) for size, value in zip(sizes, values, strict=True))
        return max(0.0, mean_value + max(0.0, covariance / spread) * (rows - mean_size))
    after = next(index for index, size in enumerate(sizes) if size >= rows)
    if sizes[after] == rows:
        return values[after]
    before = after - 1
    part = (rows - sizes[before]) / (sizes[after] - sizes[before])
    return values[before] + part * (values[after] - values[before])


class LayerCosts:
    """Times of consecutive layers by rows, as sums from the first layer on."""

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        self.layers = layers
        self._sizes = [tuple(cost.micro_batch for cost in layer.costs) for layer in self.layers]
        self._sums: dict[tuple[str, float, float], list[float]] = {}
        self.update_sums = [0.0, *accumulate(layer.update_s for layer in self.layers)]

    def forward_sums(self, rows: float) -> list[float]:
        """Return, for every position, the seconds of the forwards of all layers before it."""
        return self._summed("forward", rows, 0.0)

    def backward_sums(self, rows: float, adding: float) -> list[float]:
        """Return, for every position, the seconds of the backwards of all layers before it.

        ``adding`` is the share of backwards that add to gradients, instead of making them.
        """
        return self._summed("backward", rows, adding)

    @property
    def halved(self) -> bool:
        """Whether the halves of every layer's backward were measured."""
        costs = (cost for layer in self.layers for cost in layer.costs)
        return all(cost.backward_input_s is not None and cost.backward_weight_s is not None for cost in costs)

    def input_sums(self, rows: float) -> list[float]:
        """Return, for every position, the seconds of the input halves of all layers before it."""
        return self._summed("input", rows, 0.0)

    def weight_sums(self, rows: float, adding: float) -> list[float]:
        """Return, for every position, the seconds of the weight halves of all layers before it; ``adding`` as above."""
        return self._summed("weight", rows, adding)

    def recompute_s(self, layer: int, rows: float) -> float:
        """Return what a backward takes longer that runs the layer forward again; a forward, where not measured."""
        costs = self.layers[layer].costs
        known = [cost.recompute_s for cost in costs if cost.recompute_s is not None]
        if len(known) < len(costs):
            return self._seconds(layer, "forward", rows)
        return at_rows(self._sizes[layer], known, rows)

    def bytes_at(self, layer: int, value: str, rows: float) -> int:
        """Return ``peak_bytes`` or ``output_bytes`` of a layer at ``rows``, rounded up."""
        costs = self.layers[layer].costs
        values = [float(cost.peak_bytes if value == "peak_bytes" else cost.output_bytes) for cost in costs]
        return _up(at_rows(self._sizes[layer], values, rows))

    def pending_at(self, layer: int, rows: float) -> int | None:
        """Return the bytes that a layer holds from the first half of its backward to the second; None: not measured."""
        costs = self.layers[layer].costs
        known = [float(cost.weight_saved_bytes) for cost in costs if cost.weight_saved_bytes is not None]
        return _up(at_rows(self._sizes[layer], known, rows)) if len(known) == len(costs) else None

    def saved_at(self, layer: int, rows: float) -> dict[str, int]:
        """Return the bytes of every storage that a layer keeps at ``rows``, by the storage's name."""
        by_storage: dict[str, tuple[list[int], list[float]]] = {}
        for cost in self.layers[layer].costs:
            for saved in cost.saved:
                sizes, values = by_storage.setdefault(saved.storage, ([], []))
                if sizes and sizes[-1] == cost.micro_batch:
                    values[-1] = max(values[-1], float(saved.bytes))
                else:
                    sizes.append(cost.micro_batch)
                    values.append(float(saved.bytes))
        return {storage: _up(at_rows(sizes, values, rows)) for storage, (sizes, values) in by_storage.items()}

    def _summed(self, kind: str, rows: float, adding: float) -> list[float]:
        key = (kind, rows, adding)
        if key not in self._sums:
            layers = enumerate(self.layers)
            seconds = (self._seconds(index, kind, rows) + adding * layer.accumulate_s for index, layer in layers)
            self._sums[key] = [0.0, *accumulate(seconds)]
        return self._sums[key]

    def provenance(self, first: int, stop: int, rows: float) -> Provenance:
        """Return where the times of layers ``first:stop`` at ``rows`` samples come from."""
        known = least_certain(self._known(layer, rows) for layer in range(first, stop))
        assert known is not None
        return known

    def _known(self, layer: int, rows: float) -> Provenance:
        sizes, costs = self._sizes[layer], self.layers[layer].costs
        if rows in sizes:
            return costs[sizes.index(rows)].provenance
        if not sizes[0] < rows < sizes[-1]:
            return "estimated"
        after = next(index for index, size in enumerate(sizes) if size > rows)
        return least_certain(("interpolated", costs[after - 1].provenance, costs[after].provenance)) or "interpolated"

    def _seconds(self, layer: int, kind: str, rows: float) -> float:
        costs: tuple[Cost, ...] = self.layers[layer].costs
        fit = {"forward": self.layers[layer].forward_fit, "backward": self.layers[layer].backward_fit}.get(kind)
        if fit is not None and not self._sizes[layer][0] <= rows <= self._sizes[layer][-1]:
            return fit.at(rows)
        return at_rows(self._sizes[layer], [_measured_s(cost, kind) for cost in costs], rows)


def _measured_s(cost: Cost, kind: str) -> float:
    """Return what was measured of a layer: its forward, its backward, or one half of that."""
    if kind == "input":
        return cost.backward_input_s or 0.0
    if kind == "weight":
        return cost.backward_weight_s or 0.0
    return cost.forward_s if kind == "forward" else cost.backward_s


def _up(value: float) -> int:
    # A hair of float error must not add a byte to a size that was measured exactly.
    return -int(-(value - 1e-6) // 1)
