"""Odd: blocks with parameters, random numbers or operators that few models have."""

from __future__ import annotations

from fuzzing.part import ANY, LINEAR, Part

__all__ = ["LISTED", "NUMBERS", "PARAMETERS"]

PARAMETERS = (
    Part(
        "scalar_parameter",
        f"""{LINEAR}        self.gain, self.one = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(1, d))
    def forward(self, h):
        return h + self.gain * torch.tanh(self.lin(h) + self.one)
""",
    ),
    Part(
        "empty_parameter",
        f"""{LINEAR}        self.none = nn.Parameter(torch.zeros(0, d))
    def forward(self, h):
        weight = torch.cat([self.lin.weight, self.none])
        return torch.tanh(F.linear(h, weight, self.lin.bias))
""",
    ),
    Part(
        "frozen_block",
        f"""{LINEAR}        self.lin.requires_grad_(False)
    def forward(self, h):
        return h + torch.tanh(self.lin(h))
""",
    ),
    Part(
        "frozen_bias",
        f"""{LINEAR}        self.lin.bias.requires_grad_(False)
    def forward(self, h):
        return torch.tanh(self.lin(h))
""",
    ),
    Part(
        "unused_parameter",
        f"""{LINEAR}        self.spare = nn.Linear(d, d)
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
        f"""{LINEAR}        self.register_buffer("links", torch.eye(d).to_sparse())
    def forward(self, h):
        mixed = torch.sparse.mm(self.links, h.flatten(0, -2).t()).t().reshape(h.shape)
        return torch.tanh(self.lin(mixed))
""",
        refusal="sparse",
    ),
    Part(
        "no_gradient_block",
        f"""{LINEAR}    def forward(self, h):
        with torch.no_grad():
            shift = torch.tanh(self.lin(h))
        return h + shift
""",
    ),
    Part(
        "detached_inside",
        f"""{LINEAR}    def forward(self, h):
        return torch.cat([h[..., :3].detach(), h[..., 3:]], -1) + torch.tanh(self.lin(h.detach()))
""",
    ),
    Part(
        "straight_through",
        f"""{LINEAR}    def forward(self, h):
        soft = torch.tanh(self.lin(h))
        return soft + (soft.round() - soft).detach()
""",
    ),
)

NUMBERS = (
    Part(
        "noise",
        f"""{LINEAR}    def forward(self, h):
        return torch.tanh(self.lin(h)) + 0.1 * torch.randn_like(h)
""",
    ),
    Part(
        "own_generator",
        f"""{LINEAR}        self.generator = torch.Generator().manual_seed(7)
    def forward(self, h):
        return torch.tanh(self.lin(h)) + 0.1 * torch.rand(h.shape[-1], generator=self.generator, dtype=h.dtype)
""",
        refusal=ANY,
        replicas=False,
    ),
    Part(
        "python_number",
        f"""{LINEAR}    def forward(self, h):
        return torch.tanh(self.lin(h)) * (1 + random.random())
""",
        refusal=ANY,
        replicas=False,
    ),
    Part(
        "numpy_number",
        f"""{LINEAR}    def forward(self, h):
        return torch.tanh(self.lin(h)) * (1 + float(np.random.rand()))
""",
        refusal=ANY,
        replicas=False,
    ),
)

LISTED = (
    Part(
        "sometimes",
        f"""{LINEAR}        self.other = nn.Linear(d, d)
    def forward(self, h):
        return torch.tanh(self.lin(h) if float(h.detach().sum()) > 0 else self.other(h))
""",
        listed=True,
        replicas=False,
        refusal="replica|shard",
    ),
    Part(
        "checkpointed",
        f"""{LINEAR}    def forward(self, h):
        return checkpoint(lambda x: torch.tanh(self.lin(x)), h, use_reentrant=False)
""",
        refusal="checkpoint",
    ),
    Part(
        "own_function",
        f"""{LINEAR}    def forward(self, h):
        return torch.tanh(Doubled.apply(self.lin(h)))
""",
        refusal="autograd.Function|Function",
    ),
    Part(
        "gradient_hook",
        f"""{LINEAR}    def forward(self, h):
        out = torch.tanh(self.lin(h))
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * 0.5)
        return out
""",
        refusal="hook",
    ),
)
