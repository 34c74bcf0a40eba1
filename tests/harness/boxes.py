"""Boxes of indices, one side a dimension, cut at random into smaller ones."""

import random

Box = list[tuple[int, int]]


def cut(rng: random.Random, box: Box, left: int) -> list[Box]:
    """Cut a box into smaller ones, somewhere and anyhow; one that holds nothing stays whole."""
    dims = [dim for dim, (start, stop) in enumerate(box) if stop - start > 1]
    if not left or not dims or any(start == stop for start, stop in box):
        return [box]
    dim = rng.choice(dims)
    start, stop = box[dim]
    at = rng.randrange(start + 1, stop)
    parts = ([*box[:dim], side, *box[dim + 1 :]] for side in ((start, at), (at, stop)))
    return [each for part in parts for each in cut(rng, part, left - 1)]
