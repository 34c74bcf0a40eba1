"""Tensors of every type and shape, cut anyhow among files, come back in any part."""

import os
import random
from pathlib import Path

import pytest
import torch

from autopar.errors import FileError
from autopar.formats.checkpoint import IndexRange, Piece, PieceFile, RankPart, StoredTensor, merge
from autopar.runtime.checkpoint import weights
from autopar.runtime.checkpoint.folder import CheckpointReader, check_file
from boxes import Box, cut
from checkpoint_pairs import PLAN, RUN

TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def _drawn(rng: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of any shape: scalars and empty ones among them."""
    shape = [rng.choice([0, 1, 2, 3, 5]) if rng.random() < 0.2 else rng.randint(1, 6) for _ in range(rng.randrange(4))]
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _ranges(box: Box, shape: tuple[int, ...]) -> tuple[IndexRange, ...]:
    sides = zip(box, shape, strict=True)
    return tuple(
        IndexRange(dim=dim, start=start, stop=stop)
        for dim, ((start, stop), size) in enumerate(sides)
        if (start, stop) != (0, size)
    )


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(*side) for side in box)]


def test_a_byte_that_changes_is_noticed_though_size_and_time_are_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "rank.safetensors"
    stored = weights.write(path, {"x": torch.zeros(8)})
    file = PieceFile(name=path.name, bytes=stored["bytes"], sha256=stored["sha256"])
    check_file(tmp_path, file)
    times = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(FileError, match="its sha256 is not the one"):
        check_file(tmp_path, file)


@pytest.mark.some(36)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_part_of_a_tensor_that_is_cut_anyhow_is_read(dtype: torch.dtype, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{dtype}/{seed}")
    tensor = _drawn(rng, dtype)
    shape, whole = tuple(tensor.shape), [(0, size) for size in tensor.shape]
    boxes = cut(rng, whole, rng.randrange(3))
    # What stands before it in a file moves it to another place, at which kernels may not expect it.
    odd = torch.ones(rng.randrange(1, 8), dtype=torch.uint8)
    pieces, files = [], []
    while boxes:
        # A file may have several of them.
        name, several = f"part-{len(files)}.safetensors", [boxes.pop() for _ in range(rng.randint(1, len(boxes)))]
        keys = ["parameter/w", *(f"{number}:parameter/w" for number in range(1, len(several)))]
        held = {key: _part(tensor, box).contiguous() for key, box in zip(keys, several, strict=True)}
        file = weights.write(tmp_path / name, {"odd": odd, **held})
        files.append(PieceFile(name=name, bytes=file["bytes"], sha256=file["sha256"]))
        for number, box in enumerate(several):
            pieces.append(Piece(file=name, ranges=_ranges(box, shape), key=keys[number] if number else None))
    kind = str(dtype).removeprefix("torch.")
    record = StoredTensor(kind="parameter", name="w", shape=shape, dtype=kind, pieces=tuple(pieces))
    manifest = merge([RankPart(tensors=(record,), files=tuple(files))], 1, RUN, PLAN, [])
    with CheckpointReader(tmp_path, manifest) as reader:
        for _ in range(6):
            wanted = [(0, 0) if not size else sorted(rng.sample(range(size + 1), 2)) for size in shape]
            box = [(start, stop) for start, stop in (wanted if rng.random() < 0.8 else whole)]
            found = reader.read(manifest.tensors[0], [] if box == whole else _ranges(box, shape))
            expected = _part(tensor, box)
            assert (found.dtype, found.shape) == (dtype, expected.shape)
            # Bytes, since not all types are compared.
            one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (found, expected))
            assert torch.equal(one, other)
        with pytest.raises(FileError, match="the manifest says int16"):
            reader.read(record.model_copy(update={"dtype": "int16"}), [])
