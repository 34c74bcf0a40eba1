"""Stems: how a model reads its samples, and what samples there are."""

from __future__ import annotations

from fuzzing.part import Part, by_name

__all__ = ["DATASETS", "SAMPLES", "STEMS"]

_VECTORS, _TOKENS, _IMAGES = ("vectors",), ("tokens",), ("images",)
STEMS = by_name(
    (
        Part("affine", "nn.Linear(6, d)", data=_VECTORS),
        Part("embedding", "nn.Embedding(9, d)", data=_TOKENS, weight=8),
        Part("padded_embedding", "nn.Embedding(9, d, padding_idx=0)", data=_TOKENS),
        Part(
            "limited_embedding",
            "nn.Embedding(9, d, max_norm=1.0)",
            data=_TOKENS,
            refusal="writ|changes|replica|recompute",
        ),
        Part("sparse_embedding", "nn.Embedding(9, d, sparse=True)", data=_TOKENS, refusal="sparse"),
        Part("patches", "nn.Conv2d(2, d, 3, stride=2, padding=1)", data=_IMAGES),
    )
)

# Expressions of one sample's x, by its index.
DATASETS = by_name(
    (
        Part("vectors", "torch.randn(6, generator=chance, dtype=torch.float64)", data=_VECTORS),
        Part("tokens", "torch.randint(0, 9, (4,), generator=chance)", data=_TOKENS),
        Part("images", "torch.randn(2, 6, 6, generator=chance, dtype=torch.float64)", data=_IMAGES),
    )
)

# How a sample is given and a batch read: what __getitem__ returns of x and y, and expressions of a batch's x and y.
SAMPLES = by_name(
    (
        Part("dict", '{"x": x, "y": y}\nbatch["x"]\nbatch["y"]', weight=4),
        Part("tuple", "x, y\nbatch[0]\nbatch[-1]", weight=3),
        Part("nested", '{"x": x, "rest": {"y": y, "z": x[:1]}}\nbatch["x"]\nbatch["rest"]["y"]'),
    )
)
