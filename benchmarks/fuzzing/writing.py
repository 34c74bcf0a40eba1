"""Writing: blocks whose forward writes buffers, parameters or activations, and blocks that keep state in Python."""

from __future__ import annotations

from fuzzing.part import ANY, LINEAR, Part

__all__ = ["PYTHON_STATE", "WRITING"]

_STATE = "replica|state|buffer|writes|written|recompute"

WRITING = (
    Part(
        "average_then_read",
        f"""{LINEAR}        self.register_buffer("mean", torch.zeros(d))
    def forward(self, h):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.detach().flatten(0, -2).mean(0), alpha=0.1)
        return torch.tanh(self.lin(h - self.mean.clone()))
""",
        refusal=_STATE,
    ),
    Part(
        "read_then_average",
        f"""{LINEAR}        self.register_buffer("scale", torch.ones(d))
    def forward(self, h):
        out = h / (1 + self.scale.clone())
        with torch.no_grad():
            self.scale.lerp_(h.detach().flatten(0, -2).abs().amax(0), 0.2)
        return torch.tanh(self.lin(out))
""",
        refusal=_STATE,
    ),
    Part(
        "saved_then_moved",
        f"""{LINEAR}        self.register_buffer("temperature", torch.ones(d))
    def forward(self, h):
        self.temperature.mul_(0.9)
        return h + torch.tanh(self.lin(h)) * self.temperature
""",
        refusal=_STATE,
    ),
    Part(
        "buffer_replaced",
        f"""{LINEAR}        self.register_buffer("mean", torch.zeros(d))
    def forward(self, h):
        self.mean = 0.9 * self.mean + 0.1 * h.detach().flatten(0, -2).mean(0)
        return torch.tanh(self.lin(h - self.mean))
""",
        refusal=ANY,
    ),
    Part(
        "counter_buffer",
        f"""{LINEAR}        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    def forward(self, h):
        self.calls += 1
        return torch.tanh(self.lin(h)) * (1 + 0.1 * (self.calls % 3))
""",
        refusal=_STATE,
    ),
    Part(
        "codebook",
        f"""{LINEAR}        self.register_buffer("codes", torch.linspace(-1, 1, 5 * d).view(5, d))
    def forward(self, h):
        flat = h.detach().flatten(0, -2)
        nearest = (flat[:, None] - self.codes[None]).square().sum(-1).argmin(-1)
        picked = self.codes[nearest].view_as(h)
        with torch.no_grad():
            self.codes.index_add_(0, nearest, 0.05 * (flat - self.codes[nearest]))
        return torch.tanh(self.lin(h + (picked - h).detach()))
""",
        refusal=_STATE,
    ),
    Part(
        "queue",
        f"""{LINEAR}        self.register_buffer("queue", torch.linspace(0, 1, 3 * d).view(3, d))
    def forward(self, h):
        out = self.lin(h + torch.softmax(h @ self.queue.clone().t(), -1) @ self.queue.clone())
        self.queue.copy_(torch.cat([h.detach().flatten(0, -2).mean(0, keepdim=True), self.queue[:-1]]))
        return torch.tanh(out)
""",
        refusal=_STATE,
    ),
    Part(
        "unread_statistic",
        f"""{LINEAR}        self.register_buffer("seen", torch.zeros(d))
    def forward(self, h):
        self.seen += h.detach().flatten(0, -2).sum(0)
        return torch.tanh(self.lin(h))
""",
        refusal=_STATE,
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
        refusal=_STATE,
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
        refusal=_STATE,
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
        refusal=_STATE,
    ),
    Part(
        "clamped_parameter",
        f"""{LINEAR}    def forward(self, h):
        with torch.no_grad():
            self.lin.weight.clamp_(-0.3, 0.3)
        return torch.tanh(self.lin(h))
""",
        refusal=ANY,
    ),
    Part(
        "written_activation",
        f"""{LINEAR}    def forward(self, h):
        out = self.lin(h)
        out.mul_(0.5).add_(0.1)
        out[..., :2] += 1
        return torch.tanh(out)
""",
    ),
    Part(
        "written_input",
        f"""{LINEAR}    def forward(self, h):
        h = h * 1.0
        kept = h
        h.add_(0.5)
        return torch.tanh(self.lin(h)) + kept
""",
    ),
    Part(
        "input_written_for_others",
        f"""{LINEAR}    def forward(self, h):
        h += 0.25
        return h + torch.sin(self.lin(h))
""",
        refusal=ANY,
    ),
)

PYTHON_STATE = (
    Part(
        "late_switch",
        f"""{LINEAR}        self.calls = 0
    def forward(self, h):
        self.calls += 1
        h = torch.tanh(self.lin(h))
        return h * 2 if self.calls > 9 else h
""",
        refusal=ANY,
    ),
    Part(
        "state_in_dict",
        f"""{LINEAR}        self.state = {{"n": 0}}
    def forward(self, h):
        self.state["n"] += 1
        return torch.tanh(self.lin(h)) / self.state["n"]
""",
        refusal=ANY,
    ),
    Part(
        "state_in_list",
        f"""{LINEAR}        self.history = []
    def forward(self, h):
        self.history.append(1.0)
        return torch.tanh(self.lin(h)) * (1 + 1 / len(self.history))
""",
        refusal=ANY,
    ),
    Part(
        "state_in_closure",
        f"""{LINEAR}        self.tick = make_counter()
    def forward(self, h):
        return torch.tanh(self.lin(h)) * (1 + 0.1 * (self.tick() % 4))
""",
        refusal=ANY,
    ),
    Part(
        "state_in_global",
        f"""{LINEAR}    def forward(self, h):
        TALLY["forwards"] += 1
        return torch.tanh(self.lin(h)) * (1 + 1 / TALLY["forwards"])
""",
        refusal=ANY,
    ),
    Part(
        "harmless_log",
        f"""{LINEAR}        self.shapes = []
    def forward(self, h):
        self.shapes.append(tuple(h.shape))
        return torch.tanh(self.lin(h))
""",
        refusal="shapes",
    ),
    Part(
        "ignored_log",
        f"""{LINEAR}        self.ignored = []
    def forward(self, h):
        self.ignored.append(tuple(h.shape))
        return torch.tanh(self.lin(h))
""",
    ),
    Part(
        "harmless_cache",
        f"""{LINEAR}        self.cache = {{}}
    def forward(self, h):
        if "ramp" not in self.cache:
            self.cache["ramp"] = torch.linspace(0, 1, h.shape[-1], dtype=torch.float64)
        return torch.tanh(self.lin(h)) + self.cache["ramp"]
""",
    ),
    Part(
        "cached_function",
        f"""{LINEAR}    def forward(self, h):
        return torch.tanh(self.lin(h)) * ramp_scale(h.shape[-1])
""",
    ),
)
