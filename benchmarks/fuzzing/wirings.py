"""Wirings: what a model does between its blocks: skips, detached tensors, tied and called-again modules, odd types."""

from __future__ import annotations

from dataclasses import replace

from fuzzing.part import ANY, EVERY, ROWS, Part, by_name

__all__ = ["WIRINGS"]

_WIRINGS = (
    # A line of the constructor, and lines behind blocks: {a} and {b} are two blocks, a before b.
    Part("skip", "init:\nbehind {b}:\nh = h + kept{a}\n", weight=4),
    Part("two_branches", "init:\nbehind {b}:\nh = h * torch.sigmoid(kept{a})\n", weight=2),
    Part("detached_skip", "init:\nbehind {b}:\nh = h + kept{a}.detach()\n"),
    Part("detached_chain", "init:\nbehind {a}:\nh = h.detach()\n", weight=3),
    Part(
        "partly_detached",
        "init:\nbehind {a}:\nh = torch.cat([h[..., :3].detach(), h[..., 3:]], -1)\n",
    ),
    Part(
        "detached_bypass",
        "init:\nbehind {b}:\nh = h.detach() + kept{a}\n",
    ),
    Part(
        "tied_weights",
        "init:\nself.first_tied, self.second_tied = nn.Linear(d, d), nn.Linear(d, d)\n"
        "self.second_tied.weight = self.first_tied.weight\n"
        "behind {a}:\nh = torch.tanh(self.first_tied(h))\nbehind {b}:\nh = torch.tanh(self.second_tied(h))\n",
        weight=2,
    ),
    Part("called_again", "init:\nbehind {b}:\nh = self.blocks[{a}](h)\n", weight=2),
    Part("frozen_modules", "init:\nself.blocks[{a}].requires_grad_(False)\n"),
    Part("unused_module", "init:\nself.spare = nn.Linear(d, d)\n"),
    Part(
        "shared_scale",
        "init:\nself.scale = nn.Parameter(torch.linspace(-0.1, 0.1, d))\nbehind {a}:\nh = h * self.scale.exp()\n"
        "behind {b}:\nh = h * self.scale.exp()\n",
    ),
    Part(
        "integers_cross",
        "init:\nself.routes = nn.Embedding(d, d)\nbehind {a}:\nroute = h.argmax(-1)\n"
        "behind {b}:\nh = h + self.routes(route)\n",
    ),
    Part(
        "booleans_cross",
        "init:\nbehind {a}:\npositive = h > 0\nbehind {b}:\nh = torch.where(positive, h, h * 0.5)\n",
    ),
    Part(
        "complex_crosses",
        "init:\nbehind {a}:\nz = torch.complex(h, h.flip(-1))\nbehind {b}:\nh = h + 0.1 * z.imag * z.abs()\n",
        refusal="complex",
    ),
    Part(
        "conjugate_crosses",
        "init:\nbehind {a}:\nz = torch.complex(h, h.flip(-1)).conj()\nbehind {b}:\nh = h + 0.1 * (z * z).imag\n",
        refusal="complex|conj",
    ),
    Part(
        "transposed_crosses",
        "init:\nbehind {a}:\nturned = h.transpose(0, 1) * 1.5\nbehind {b}:\nh = h + turned.transpose(0, 1)\n",
    ),
    Part(
        "written_skip",
        "init:\nbehind {a}:\nsaved = h * 1.0\nbehind {b}:\nsaved += h\nh = torch.tanh(saved)\n",
    ),
    Part(
        "view_written",
        "init:\nbehind {a}:\nh = h * 1.0\npart = h[..., :2]\npart.mul_(0.5)\n"
        "behind {b}:\nh = h + part.sum(-1, keepdim=True)\n",
        refusal=ANY,
    ),
    Part(
        "buffer_of_two",
        "init:\nself.register_buffer('level', torch.zeros(d))\n"
        "behind {a}:\nwith torch.no_grad():\n    self.level.lerp_(h.detach().flatten(0, -2).mean(0), 0.2)\n"
        "behind {b}:\nh = h - self.level.clone()\n",
        refusal="replica|state|buffer|writes|written|recompute",
    ),
    Part(
        "unused_head",
        "init:\nself.other = nn.Linear(d, 2)\nlast:\nspare = self.other(h)\n",
        weight=2,
    ),
    Part(
        "tied_head",
        "init:\nself.back = nn.Linear(d, 9, bias=False)\nself.back.weight = self.inp.weight\n"
        "last:\nh = h + 0.1 * self.back(h) @ self.inp.weight\n",
        data=("tokens",),
        weight=3,
    ),
    Part("written_model_input", "init:\nfirst:\nx.mul_(0.5).add_(1.0)\n", refusal=ANY, data=("vectors",)),
    Part(
        "data_dependent_branch",
        "init:\nbehind {a}:\nif h.sum() > 0:\n    h = h * 2\n",
        refusal=ANY,
        replicas=False,
    ),
    Part(
        "constant_of_parameters",
        "init:\nself.raw = nn.Parameter(torch.zeros(d))\nbehind {a}:\nh = h + F.softplus(self.raw)\n",
    ),
)

_IMAGES_TOO = (
    "skip",
    "two_branches",
    "detached_skip",
    "detached_chain",
    "called_again",
    "frozen_modules",
    "booleans_cross",
)
WIRINGS = by_name(
    tuple(
        replace(part, data=ROWS) if part.data == EVERY and part.name not in _IMAGES_TOO else part for part in _WIRINGS
    )
)
