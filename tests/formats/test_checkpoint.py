"""Manifests: every letter of one counts, and pieces make up tensors."""

import json
import random
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from autopar.errors import FileError
from autopar.formats.checkpoint import (
    Checkpoint,
    IndexRange,
    OptimizerState,
    ParameterGroup,
    Piece,
    PieceFile,
    RankPart,
    SavedPlan,
    SavedRun,
    SchedulerState,
    StateKey,
    StateNumber,
    StoredTensor,
    merge,
)
from boxes import cut
from played import small_plan

RUN = SavedRun(model="model.py", batch=8, seed=0, samples=64)
SHAPE: dict[str, Any] = {"ranks": 2, "stages": 1, "schedule": "1f1b", "micro_batches": 2, "division": ((2, 2),)}
PLAN = SavedPlan(sha256="a" * 64, sharded=True, precision="fp32", torch="2.13.0", **SHAPE)
FILES = [PieceFile(name=f"stage-00000-replica-0000{at}.safetensors", bytes=10, sha256="b" * 64) for at in range(2)]


def tensor(*pieces: Piece, shape: tuple[int, ...] = (4, 6)) -> StoredTensor:
    return StoredTensor(kind="parameter", name="w", shape=shape, dtype="float32", pieces=pieces)


def piece(at: int, *ranges: tuple[int, int, int]) -> Piece:
    return Piece(file=FILES[at].name, ranges=tuple(IndexRange(dim=dim, start=a, stop=b) for dim, a, b in ranges))


def manifest() -> Checkpoint:
    groups = (ParameterGroup(parameters=("w",), settings={"lr": 0.1}, current={"lr": 0.05}),)
    numbers = (StateNumber(parameter="w", state="count", value=3),)
    parts = [
        RankPart(
            tensors=(tensor(piece(at, (0, 2 * at, 2 * at + 2))),),
            files=(FILES[at],),
            optimizer=OptimizerState(kind="torch.optim.sgd.SGD", groups=groups, numbers=numbers),
            scheduler=SchedulerState(kind="StepLR"),
        )
        for at in range(2)
    ]
    return merge(parts, 3, RUN, PLAN, [StateKey(key="w", tensor="w"), StateKey(key="tied", tensor="w")])


@pytest.mark.reliability(19)
def test_parts_of_ranks_become_one_manifest_of_which_each_byte_counts() -> None:
    found = manifest()
    assert [each.file for each in found.tensors[0].pieces] == [file.name for file in FILES]
    assert found.optimizer is not None
    assert [group.parameters for group in found.optimizer.groups] == [("w",)]
    assert len(found.optimizer.numbers) == 1
    assert Checkpoint.read(found.dumps(), Path("manifest.json")) == found
    # Parameters whose rate is another by now are another group.
    names = {"a": 0.1, "b": 0.2, "c": 0.1}
    groups = [ParameterGroup(parameters=(each,), settings={}, current={"lr": rate}) for each, rate in names.items()]
    parts = [RankPart(optimizer=OptimizerState(kind="SGD", groups=(group,))) for group in groups]
    joined = merge(parts, 3, RUN, PLAN, []).optimizer
    assert joined is not None
    assert [group.parameters for group in joined.groups] == [("a", "c"), ("b",)]
    text = manifest().dumps().encode()
    for at in range(len(text)):
        for bit in (0, 3, 7):
            changed = bytearray(text)
            changed[at] ^= 1 << bit
            with pytest.raises((FileError, UnicodeDecodeError)):
                Checkpoint.read(bytes(changed).decode(), Path("manifest.json"))
    with pytest.raises(FileError, match="damaged"):
        Checkpoint.read(manifest().dumps() + "\n", Path("manifest.json"))
    text = manifest().dumps()
    assert "tensor_parallel" not in text
    assert '"key": "1:' not in text
    pieces = piece(0, (0, 0, 2)), piece(0, (0, 2, 4)).model_copy(update={"key": "1:parameter/w"})
    plan = PLAN.model_copy(update={"tensor_parallel": (2,)})
    found = merge([RankPart(tensors=(tensor(*pieces),), files=(FILES[0],))], 3, RUN, plan, [])
    read = Checkpoint.read(found.dumps(), Path("manifest.json"))
    assert read.plan.tensor_parallel == (2,)
    assert [each.key for each in read.tensors[0].pieces] == [None, "1:parameter/w"]
    made = small_plan((2, 1), 4)
    first = made.stages[0].model_copy(update={"shard": "optimizer", "tensor_parallel": 2})
    said = SavedPlan.of(made.model_copy(update={"stages": (first, made.stages[1])}), "2.13.0")
    assert (said.sharded, said.tensor_parallel, SavedPlan.of(made, "2.13.0").sharded) == (True, (2, 1), False)


@pytest.mark.parametrize(
    "pieces",
    [
        (piece(0, (0, 0, 2)),),
        (piece(0, (0, 0, 2)), piece(1, (0, 1, 4))),
        (piece(0, (0, 0, 2)), piece(1, (0, 0, 2))),
        (piece(0), piece(1)),
        (piece(0, (0, 0, 5)),),
        (piece(0, (2, 0, 1)),),
        (piece(0, (0, 0, 2), (0, 0, 2)), piece(1, (0, 2, 4))),
        (piece(0, (0, 2, 2)), piece(1)),
        (piece(0, (0, 0, 4), (1, 0, 3)), piece(1, (0, 0, 2), (1, 3, 6))),
        (piece(0, (0, 0, 2)), piece(0, (0, 2, 4))),
    ],
)
def test_pieces_that_do_not_make_up_a_tensor_are_refused(pieces: tuple[Piece, ...]) -> None:
    part = RankPart.model_construct(tensors=(tensor(*pieces),), files=tuple(FILES))
    with pytest.raises(ValidationError, match=r"make up|no such indices|given twice"):
        merge([part], 3, RUN, PLAN, [])


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/etc/passwd", "a/b", "..", ".hidden", "", "a\nb", "x" * 201, "a\\b"]
)
@pytest.mark.reliability(22)
def test_a_manifest_names_files_of_its_own_folder_alone(name: str) -> None:
    text = manifest().dumps().replace(json.dumps(FILES[0].name), json.dumps(name))
    with pytest.raises(FileError, match=r"manifest.json: \$\.tensors\[0\]\.pieces\[0\]\.file: String should match"):
        Checkpoint.read(text, Path("manifest.json"))


@pytest.mark.parametrize("seed", range(8))
def test_pieces_of_a_tensors_volume_are_taken_only_if_each_element_is_in_one_of_them(seed: int) -> None:
    rng = random.Random(seed)
    taken = refused = 0
    while taken < 10 or refused < 30:
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 4)))
        boxes = cut(rng, [(0, size) for size in shape], rng.randint(1, 4))
        # Moved along a dimension a box keeps its volume: into another, or to where one was that moves the other way.
        for _ in range(rng.randint(0, 3)):
            box, dim = rng.choice(boxes), rng.randrange(len(shape))
            (start, stop), by = box[dim], rng.choice((-1, 1))
            if start + by >= 0 and stop + by <= shape[dim]:
                box[dim] = (start + by, stop + by)
        counts = Counter(element for box in boxes for element in product(*(range(*side) for side in box)))
        sides = [[(dim, start, stop) for dim, (start, stop) in enumerate(box)] for box in boxes]
        pieces = [piece(0, *each).model_copy(update={"key": f"{at}"}) for at, each in enumerate(sides)]
        part = RankPart(tensors=(tensor(*pieces, shape=shape),), files=tuple(FILES))
        if all(counts[element] == 1 for element in product(*map(range, shape))):
            merge([part], 3, RUN, PLAN, [])
            taken += 1
        else:
            with pytest.raises(ValidationError, match="make up"):
                merge([part], 3, RUN, PLAN, [])
            refused += 1


@pytest.mark.parametrize("seed", range(15))
def test_pieces_cut_at_random_make_up_a_tensor_and_without_one_of_them_or_with_one_twice_do_not(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
    boxes = cut(rng, [(0, size) for size in shape], 3)
    rng.shuffle(boxes)
    sides = [[(dim, start, stop) for dim, (start, stop) in enumerate(box)] for box in boxes]
    pieces = [piece(0, *each).model_copy(update={"key": f"{at}"}) for at, each in enumerate(sides)]
    found = merge([RankPart(tensors=(tensor(*pieces, shape=shape),), files=tuple(FILES))], 3, RUN, PLAN, [])
    assert len(found.tensors[0].pieces) == len(boxes)
    for wrong in (pieces[1:], [*pieces, pieces[0]], [*pieces[1:], pieces[0], pieces[0]]):
        if wrong:
            with pytest.raises(ValidationError):
                merge([RankPart(tensors=(tensor(*wrong, shape=shape),), files=tuple(FILES))], 3, RUN, PLAN, [])
