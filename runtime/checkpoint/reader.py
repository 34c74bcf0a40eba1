"""CheckpointReader: some of a stored tensor, put together of the pieces that hold it; nothing else is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from autopar.errors import FileError
from autopar.formats.checkpoint import Checkpoint, IndexRange, Piece, StoredTensor, sides_of
from autopar.runtime.result.weights import TensorFile


class CheckpointReader:
    """Reads the tensors of a checkpoint that has been verified."""

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        """Open nothing yet; ``checkpoint`` is the manifest of ``folder``."""
        self.checkpoint = checkpoint
        self._folder = folder
        self._opened: dict[str, TensorFile] = {}

    def read(self, record: StoredTensor, ranges: Sequence[IndexRange] = ()) -> torch.Tensor:
        """Return some of a tensor: the given indices of dimensions, and of the others all.

        Raises:
            FileError: a file does not hold what the manifest says.
        """
        wanted = sides_of(ranges, record.shape)
        dtype = getattr(torch, record.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise FileError(f"{self._folder}: {record.key} is of type {record.dtype!r}, which torch has not")
        if len(record.pieces) == 1 and wanted == sides_of(record.pieces[0].ranges, record.shape):
            return self._of_piece(record, record.pieces[0], None, dtype)
        found = torch.empty([stop - start for start, stop in wanted], dtype=dtype)
        for piece in record.pieces:
            held = sides_of(piece.ranges, record.shape)
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held, strict=True)]
            if all(start < stop for start, stop in common):
                within = tuple(slice(s - h, e - h) for (s, e), (h, _) in zip(common, held, strict=True))
                into = tuple(slice(s - w, e - w) for (s, e), (w, _) in zip(common, wanted, strict=True))
                found[into] = self._of_piece(record, piece, within, dtype)
        return found

    def _of_piece(
        self, record: StoredTensor, piece: Piece, within: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if piece.file not in self._opened:
            self._opened[piece.file] = TensorFile(self._folder / piece.file)
        file, shape = self._opened[piece.file], piece.shape(record.shape)
        found = file.read(piece.key or record.key, within)
        expected = shape if within is None else tuple(each.stop - each.start for each in within)
        if found.dtype != dtype or tuple(found.shape) != expected:
            raise FileError(
                f"{self._folder / piece.file}: {record.key} is {found.dtype} {list(found.shape)}, the manifest says "
                f"{record.dtype} {list(expected)}"
            )
        return found

    def close(self) -> None:
        """Close the files."""
        for each in self._opened.values():
            each.close()
        self._opened.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
