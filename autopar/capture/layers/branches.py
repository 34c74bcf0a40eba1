"""Joins: an operator that joins independent branches belongs to the layer that reads it.

    def forward(self, x, z):
        return self.head(torch.cat((self.left(x), self.right(z)), 1))

``cat`` runs between the calls of ``right`` and ``head``. In the layer of ``right``, it would have ``right`` wait for
``left``; in that of ``head``, stages with the two run side by side.

What runs between calls of modules is put off until it is read, where it reads something on which the call before does
not depend, or something else that is put off. It is not where no call reads it (the loss does), where it draws random
numbers, or reads or writes memory that some operator writes, or where what it reads cannot cross a boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import fx

from autopar.capture.model.effects import reachable


def put_off_joins(
    nodes: Sequence[fx.Node],
    units: Sequence[str | None],
    reads: Callable[[fx.Node], Iterable[fx.Node]],
    crosses: Callable[[fx.Node], bool],
    fixed: Collection[fx.Node],
) -> tuple[list[fx.Node], Mapping[fx.Node, fx.Node]]:
    """Return nodes with joins put off to the calls that read them; and for each join a node of that call.

    Args:
        nodes: those that layers are made of, in order.
        units: the modules whose calls they belong to; none between calls.
        reads: returns what a node reads.
        crosses: tells whether what a node gives can cross a boundary.
        fixed: nodes that stay where they are.
    """
    known, staying = set(nodes), set(fixed)

    def read(node: fx.Node) -> list[fx.Node]:
        return [each for each in reads(node) if each in known]

    while True:
        walk = _Walk(read, crosses, staying)
        for node, unit in zip(nodes, units, strict=True):
            walk.take(node, unit)
        left = walk.left.union(walk.waiting)
        if not left:
            return walk.order, walk.readers
        staying |= left


class _Walk:
    """Goes through the nodes once, with some that stay."""

    def __init__(
        self, read: Callable[[fx.Node], list[fx.Node]], crosses: Callable[[fx.Node], bool], staying: Collection[fx.Node]
    ) -> None:
        self._read, self._crosses, self._staying = read, crosses, staying
        self.order: list[fx.Node] = []
        self.readers: dict[fx.Node, fx.Node] = {}
        self.waiting: dict[fx.Node, None] = {}
        """Those that nobody has read yet."""
        self.left: set[fx.Node] = set()
        """Those that a node that stays reads: they would have to stay, too."""
        self._unit: str | None = None
        self._needs = [1]
        """By call, itself and the calls on which it depends: bits by number."""
        self._call: dict[fx.Node, int] = {}

    def take(self, node: fx.Node, unit: str | None) -> None:
        """Take the next node; ``unit`` is the module whose call it belongs to."""
        if unit is None and node not in self._staying and self._is_join(node):
            self.waiting[node] = None
            return
        if unit is not None and unit != self._unit:
            # What comes before the first call belongs to it.
            if self._unit is not None:
                self._needs.append(1 << len(self._needs))
            self._unit = unit
        wanted = reachable(self.waiting.keys() & set(self._read(node)), self._waiting_of)
        if unit is None:
            self.left.update(wanted)
        for join in [each for each in self.waiting if each in wanted]:
            del self.waiting[join]
            self.readers[join] = node
            self._place(join)
        self._place(node)

    def _is_join(self, node: fx.Node) -> bool:
        read = self._read(node)
        independent = any(each in self.waiting or not self._needs[-1] >> self._call[each] & 1 for each in read)
        return independent and all(each in self.waiting or self._crosses(each) for each in read)

    def _waiting_of(self, node: fx.Node) -> list[fx.Node]:
        return [each for each in self._read(node) if each in self.waiting]

    def _place(self, node: fx.Node) -> None:
        """Give a node to the present call."""
        self.order.append(node)
        self._call[node] = len(self._needs) - 1
        for each in self._read(node):
            self._needs[-1] |= self._needs[self._call[each]]
