"""Blocks: modules of one tensor, called one after another; plain ones, and odd ones."""

from __future__ import annotations

from dataclasses import replace

from fuzzing.odd import LISTED, NUMBERS, PARAMETERS
from fuzzing.part import EVERY, ROWS, Part, by_name
from fuzzing.writing import PYTHON_STATE, WRITING

__all__ = ["BLOCKS", "ODD", "PLAIN"]

_PLAIN = (
    Part(
        "linear",
        """
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)
    def forward(self, h):
        return torch.tanh(self.lin(h))
""",
        weight=3,
    ),
    Part(
        "residual",
        """
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
    def forward(self, h):
        return h + self.down(F.gelu(self.up(self.norm(h))))
""",
        weight=3,
    ),
    Part(
        "gated",
        """
    def __init__(self, d):
        super().__init__()
        self.value, self.gate = nn.Linear(d, d, bias=False), nn.Linear(d, d)
    def forward(self, h):
        return h + self.value(h) * torch.sigmoid(self.gate(h))
""",
    ),
    Part(
        "attention",
        """
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
    def forward(self, h):
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        return h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
""",
        data=("tokens",),
        weight=3,
    ),
    Part(
        "dropout",
        """
    def __init__(self, d):
        super().__init__()
        self.lin, self.drop = nn.Linear(d, d), nn.Dropout(0.3)
    def forward(self, h):
        return h + self.drop(torch.tanh(self.lin(h)))
""",
    ),
    Part(
        "functional_dropout",
        """
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)
    def forward(self, h):
        return self.lin(F.dropout(h, 0.2, self.training))
""",
    ),
    Part(
        "batch_norm",
        """
    def __init__(self, d):
        super().__init__()
        self.lin, self.norm = nn.Linear(d, d), nn.BatchNorm1d(d)
    def forward(self, h):
        return torch.relu(self.norm(self.lin(h)))
""",
        data=("vectors",),
        least_rows=2,
    ),
    Part(
        "convolution",
        """
    def __init__(self, d):
        super().__init__()
        self.conv = nn.Conv2d(d, d, 3, padding=1)
    def forward(self, h):
        return torch.relu(self.conv(h))
""",
        data=("images",),
        weight=3,
    ),
    Part(
        "normed_convolution",
        """
    def __init__(self, d):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(d, d, 3, padding=1, bias=False), nn.BatchNorm2d(d)
    def forward(self, h):
        return h + torch.relu(self.norm(self.conv(h)))
""",
        data=("images",),
        least_rows=2,
    ),
    Part(
        "group_norm",
        """
    def __init__(self, d):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(d, d, 1), nn.GroupNorm(2, d)
    def forward(self, h):
        return h + F.silu(self.norm(self.conv(h)), inplace=True)
""",
        data=("images",),
    ),
    Part(
        "instance_norm",
        """
    def __init__(self, d):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(d, d, 1), nn.InstanceNorm2d(d, affine=True)
    def forward(self, h):
        return torch.tanh(self.norm(self.conv(h)))
""",
        data=("images",),
    ),
)


def _of_rows(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Say of blocks that name no kind of sample that they work on features, which images do not have last."""
    return tuple(replace(part, data=ROWS) if part.data == EVERY else part for part in parts)


PLAIN = by_name(_of_rows(_PLAIN))
ODD = by_name(_of_rows((*WRITING, *PARAMETERS, *NUMBERS, *PYTHON_STATE, *LISTED)))
BLOCKS = {**PLAIN, **ODD}
