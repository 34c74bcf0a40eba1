"""Blocks: modules of one tensor, called one after another; plain ones, and those that keep state or write in place."""

from __future__ import annotations

from dataclasses import replace

from fuzzing.part import ANY, EVERY, ROWS, Part, by_name

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

_LINEAR = """
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)
"""
_STATE = {"refusal": "replica|state|buffer|writes|written|recompute"}

_WRITING = (
    Part(
        "average_then_read",
        f"""{_LINEAR}        self.register_buffer("mean", torch.zeros(d))
    def forward(self, h):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.detach().flatten(0, -2).mean(0), alpha=0.1)
        return torch.tanh(self.lin(h - self.mean.clone()))
""",
        **_STATE,
    ),
    Part(
        "read_then_average",
        f"""{_LINEAR}        self.register_buffer("scale", torch.ones(d))
    def forward(self, h):
        out = h / (1 + self.scale.clone())
        with torch.no_grad():
            self.scale.lerp_(h.detach().flatten(0, -2).abs().amax(0), 0.2)
        return torch.tanh(self.lin(out))
""",
        **_STATE,
    ),
    Part(
        "saved_then_moved",
        f"""{_LINEAR}        self.register_buffer("temperature", torch.ones(d))
    def forward(self, h):
        self.temperature.mul_(0.9)
        return h + torch.tanh(self.lin(h)) * self.temperature
""",
        **_STATE,
    ),
    Part(
        "buffer_replaced",
        f"""{_LINEAR}        self.register_buffer("mean", torch.zeros(d))
    def forward(self, h):
        self.mean = 0.9 * self.mean + 0.1 * h.detach().flatten(0, -2).mean(0)
        return torch.tanh(self.lin(h - self.mean))
""",
        refusal=ANY,
    ),
    Part(
        "counter_buffer",
        f"""{_LINEAR}        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    def forward(self, h):
        self.calls += 1
        return torch.tanh(self.lin(h)) * (1 + 0.1 * (self.calls % 3))
""",
        **_STATE,
    ),
    Part(
        "codebook",
        f"""{_LINEAR}        self.register_buffer("codes", torch.linspace(-1, 1, 5 * d).view(5, d))
    def forward(self, h):
        flat = h.detach().flatten(0, -2)
        nearest = (flat[:, None] - self.codes[None]).square().sum(-1).argmin(-1)
        picked = self.codes[nearest].view_as(h)
        with torch.no_grad():
            self.codes.index_add_(0, nearest, 0.05 * (flat - self.codes[nearest]))
        return torch.tanh(self.lin(h + (picked - h).detach()))
""",
        **_STATE,
    ),
    Part(
        "queue",
        f"""{_LINEAR}        self.register_buffer("queue", torch.linspace(0, 1, 3 * d).view(3, d))
    def forward(self, h):
        out = self.lin(h + torch.softmax(h @ self.queue.clone().t(), -1) @ self.queue.clone())
        self.queue.copy_(torch.cat([h.detach().flatten(0, -2).mean(0, keepdim=True), self.queue[:-1]]))
        return torch.tanh(out)
""",
        **_STATE,
    ),
    Part(
        "unread_statistic",
        f"""{_LINEAR}        self.register_buffer("seen", torch.zeros(d))
    def forward(self, h):
        self.seen += h.detach().flatten(0, -2).sum(0)
        return torch.tanh(self.lin(h))
""",
        **_STATE,
    ),
    Part(
        "spectral_norm_old",
        """
    def __init__(self, d):
        super().__init__()
        self.lin = nn.utils.spectral_norm(nn.Linear(d, d))
    def forward(self, h):
        return torch.tanh(self.lin(h))
""",
        **_STATE,
    ),
    Part(
        "spectral_norm_new",
        """
    def __init__(self, d):
        super().__init__()
        self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(d, d))
    def forward(self, h):
        return torch.tanh(self.lin(h))
""",
        **_STATE,
    ),
    Part(
        "tracked_instance_norm",
        """
    def __init__(self, d):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(d, d, 1), nn.InstanceNorm2d(d, track_running_stats=True)
    def forward(self, h):
        return torch.tanh(self.norm(self.conv(h)))
""",
        data=("images",),
        **_STATE,
    ),
    Part(
        "clamped_parameter",
        f"""{_LINEAR}    def forward(self, h):
        with torch.no_grad():
            self.lin.weight.clamp_(-0.3, 0.3)
        return torch.tanh(self.lin(h))
""",
        refusal=ANY,
    ),
    Part(
        "written_activation",
        f"""{_LINEAR}    def forward(self, h):
        out = self.lin(h)
        out.mul_(0.5).add_(0.1)
        out[..., :2] += 1
        return torch.tanh(out)
""",
    ),
    Part(
        "written_input",
        f"""{_LINEAR}    def forward(self, h):
        h = h * 1.0
        kept = h
        h.add_(0.5)
        return torch.tanh(self.lin(h)) + kept
""",
    ),
    Part(
        "input_written_for_others",
        f"""{_LINEAR}    def forward(self, h):
        h += 0.25
        return h + torch.sin(self.lin(h))
""",
        refusal=ANY,
    ),
)

_PARAMETERS = (
    Part(
        "scalar_parameter",
        f"""{_LINEAR}        self.gain, self.one = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(1, d))
    def forward(self, h):
        return h + self.gain * torch.tanh(self.lin(h) + self.one)
""",
    ),
    Part(
        "empty_parameter",
        f"""{_LINEAR}        self.none = nn.Parameter(torch.zeros(0, d))
    def forward(self, h):
        weight = torch.cat([self.lin.weight, self.none])
        return torch.tanh(F.linear(h, weight, self.lin.bias))
""",
    ),
    Part(
        "frozen_block",
        f"""{_LINEAR}        self.lin.requires_grad_(False)
    def forward(self, h):
        return h + torch.tanh(self.lin(h))
""",
    ),
    Part(
        "frozen_bias",
        f"""{_LINEAR}        self.lin.bias.requires_grad_(False)
    def forward(self, h):
        return torch.tanh(self.lin(h))
""",
    ),
    Part(
        "unused_parameter",
        f"""{_LINEAR}        self.spare = nn.Linear(d, d)
    def forward(self, h):
        return torch.tanh(self.lin(h))
""",
    ),
    Part(
        "complex_parameter",
        """
    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d, d, dtype=torch.complex128) * 0.3)
    def forward(self, h):
        z = torch.complex(h, h.flip(-1)) @ self.w
        return z.real + torch.tanh(z.imag)
""",
        refusal="complex|float64",
    ),
    Part(
        "sparse_matrix",
        f"""{_LINEAR}        self.register_buffer("links", torch.eye(d).to_sparse())
    def forward(self, h):
        mixed = torch.sparse.mm(self.links, h.flatten(0, -2).t()).t().reshape(h.shape)
        return torch.tanh(self.lin(mixed))
""",
        refusal="sparse",
    ),
    Part(
        "no_gradient_block",
        f"""{_LINEAR}    def forward(self, h):
        with torch.no_grad():
            shift = torch.tanh(self.lin(h))
        return h + shift
""",
    ),
    Part(
        "detached_inside",
        f"""{_LINEAR}    def forward(self, h):
        return torch.cat([h[..., :3].detach(), h[..., 3:]], -1) + torch.tanh(self.lin(h.detach()))
""",
    ),
    Part(
        "straight_through",
        f"""{_LINEAR}    def forward(self, h):
        soft = torch.tanh(self.lin(h))
        return soft + (soft.round() - soft).detach()
""",
    ),
)

_NUMBERS = (
    Part(
        "noise",
        f"""{_LINEAR}    def forward(self, h):
        return torch.tanh(self.lin(h)) + 0.1 * torch.randn_like(h)
""",
    ),
    Part(
        "own_generator",
        f"""{_LINEAR}        self.generator = torch.Generator().manual_seed(7)
    def forward(self, h):
        return torch.tanh(self.lin(h)) + 0.1 * torch.rand(h.shape[-1], generator=self.generator, dtype=h.dtype)
""",
        refusal=ANY,
        replicas=False,
    ),
    Part(
        "python_number",
        f"""{_LINEAR}    def forward(self, h):
        return torch.tanh(self.lin(h)) * (1 + random.random())
""",
        refusal=ANY,
        replicas=False,
    ),
    Part(
        "numpy_number",
        f"""{_LINEAR}    def forward(self, h):
        return torch.tanh(self.lin(h)) * (1 + float(np.random.rand()))
""",
        refusal=ANY,
        replicas=False,
    ),
)

_PYTHON_STATE = (
    Part(
        "late_switch",
        f"""{_LINEAR}        self.calls = 0
    def forward(self, h):
        self.calls += 1
        h = torch.tanh(self.lin(h))
        return h * 2 if self.calls > 9 else h
""",
        refusal=ANY,
    ),
    Part(
        "state_in_dict",
        f"""{_LINEAR}        self.state = {{"n": 0}}
    def forward(self, h):
        self.state["n"] += 1
        return torch.tanh(self.lin(h)) / self.state["n"]
""",
        refusal=ANY,
    ),
    Part(
        "state_in_list",
        f"""{_LINEAR}        self.history = []
    def forward(self, h):
        self.history.append(1.0)
        return torch.tanh(self.lin(h)) * (1 + 1 / len(self.history))
""",
        refusal=ANY,
    ),
    Part(
        "state_in_closure",
        f"""{_LINEAR}        self.tick = make_counter()
    def forward(self, h):
        return torch.tanh(self.lin(h)) * (1 + 0.1 * (self.tick() % 4))
""",
        refusal=ANY,
    ),
    Part(
        "state_in_global",
        f"""{_LINEAR}    def forward(self, h):
        TALLY["forwards"] += 1
        return torch.tanh(self.lin(h)) * (1 + 1 / TALLY["forwards"])
""",
        refusal=ANY,
    ),
    Part(
        "harmless_log",
        f"""{_LINEAR}        self.shapes = []
    def forward(self, h):
        self.shapes.append(tuple(h.shape))
        return torch.tanh(self.lin(h))
""",
        refusal="shapes",
    ),
    Part(
        "harmless_cache",
        f"""{_LINEAR}        self.cache = {{}}
    def forward(self, h):
        if "ramp" not in self.cache:
            self.cache["ramp"] = torch.linspace(0, 1, h.shape[-1], dtype=torch.float64)
        return torch.tanh(self.lin(h)) + self.cache["ramp"]
""",
        refusal="cache",
    ),
    Part(
        "cached_function",
        f"""{_LINEAR}    def forward(self, h):
        return torch.tanh(self.lin(h)) * ramp_scale(h.shape[-1])
""",
    ),
)

_LISTED = (
    Part(
        "sometimes",
        f"""{_LINEAR}        self.other = nn.Linear(d, d)
    def forward(self, h):
        return torch.tanh(self.lin(h) if float(h.detach().sum()) > 0 else self.other(h))
""",
        listed=True,
        replicas=False,
        refusal="replica|shard",
    ),
    Part(
        "checkpointed",
        f"""{_LINEAR}    def forward(self, h):
        return checkpoint(lambda x: torch.tanh(self.lin(x)), h, use_reentrant=False)
""",
        refusal="checkpoint",
    ),
    Part(
        "own_function",
        f"""{_LINEAR}    def forward(self, h):
        return torch.tanh(Doubled.apply(self.lin(h)))
""",
        refusal="autograd.Function|Function",
    ),
    Part(
        "gradient_hook",
        f"""{_LINEAR}    def forward(self, h):
        out = torch.tanh(self.lin(h))
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * 0.5)
        return out
""",
        refusal="hook",
    ),
)


def _of_rows(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Say of blocks that name no kind of sample that they work on features, which images do not have last."""
    return tuple(replace(part, data=ROWS) if part.data == EVERY else part for part in parts)


PLAIN = by_name(_of_rows(_PLAIN))
ODD = by_name(_of_rows((*_WRITING, *_PARAMETERS, *_NUMBERS, *_PYTHON_STATE, *_LISTED)))
BLOCKS = {**PLAIN, **ODD}
