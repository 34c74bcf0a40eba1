"""Grammar: draws a model from a seed, and writes it as a file.

Every part is drawn with a small probability of its own, so that most models have none to three odd ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fuzzing.blocks import BLOCKS, ODD, PLAIN
from fuzzing.objectives import LOSSES, OPTIMIZERS, SCHEDULERS
from fuzzing.part import Part
from fuzzing.stems import DATASETS, SAMPLES, STEMS
from fuzzing.text import FRAME
from fuzzing.wirings import WIRINGS

__all__ = ["Recipe", "draw", "parts_of", "smaller", "write"]

ODD_BLOCK, WIRED, LISTED, RANDOM_DATA, COLLATED, SCHEDULED = 0.09, 0.45, 0.08, 0.1, 0.1, 0.2
ODD_LOSS, ODD_OPTIMIZER, ACCEPTED = 0.12, 0.12, 0.3
WIDTH = 6
"""Of what crosses: features of a vector or token, channels of an image."""


@dataclass(frozen=True)
class Recipe:
    """What a model file is made of; names of parts."""

    seed: int
    """Of the weights' and the data's numbers."""
    data: str
    samples: str
    stem: str
    blocks: tuple[str, ...]
    wirings: tuple[tuple[str, int, int], ...]
    """Each with the two blocks that it connects."""
    loss: str
    optimizer: str
    scheduler: str | None
    listed: bool
    """Whether the file names its layers itself."""
    random_data: bool
    """Whether reading a sample draws random numbers."""
    collated: bool
    accepted: bool
    """Whether a loss that depends on micro-batches is accepted: the plain loop divides as the plan does."""

    @property
    def least_rows(self) -> int:
        """Samples that a share needs."""
        return max(part.least_rows for part in parts_of(self))

    @property
    def replicas(self) -> bool:
        """Whether the plain loop knows what replicas make of the model."""
        return all(part.replicas for part in parts_of(self))

    @property
    def writes(self) -> bool:
        """Whether a forward may write what replicas would hold apart."""
        return any("replica" in part.refusal for part in parts_of(self))


def parts_of(recipe: Recipe) -> tuple[Part, ...]:
    """Return all parts of a recipe."""
    loss = LOSSES[recipe.loss]
    chosen = [STEMS[recipe.stem], replace(loss, must=loss.must and not recipe.accepted), OPTIMIZERS[recipe.optimizer]]
    chosen += [BLOCKS[name] for name in recipe.blocks] + [WIRINGS[name] for name, _, _ in recipe.wirings]
    return tuple(chosen)


def draw(text: str) -> Recipe:
    """Return the recipe that a text seeds."""
    chance = random.Random(text)
    data = chance.choices(("vectors", "tokens", "images"), (5, 4, 1))[0]
    listed = data != "images" and chance.random() < LISTED
    blocks = tuple(_block(chance, data, listed) for _ in range(chance.randint(3, 6)))
    return Recipe(
        seed=chance.randrange(1000),
        data=data,
        # A layer of torch's own has no argument that is called as the samples' key is.
        samples="tuple" if listed else _one(chance, SAMPLES, data, listed),
        stem=_one(chance, STEMS, data, listed),
        blocks=blocks,
        wirings=() if listed else tuple(_wirings(chance, data, len(blocks))),
        loss=_objective(chance, LOSSES, data, ODD_LOSS),
        optimizer=_objective(chance, OPTIMIZERS, data, ODD_OPTIMIZER),
        scheduler=_one(chance, SCHEDULERS, data, listed) if chance.random() < SCHEDULED else None,
        listed=listed,
        random_data=chance.random() < RANDOM_DATA,
        collated=chance.random() < COLLATED,
        accepted=chance.random() < ACCEPTED,
    )


def _block(chance: random.Random, data: str, listed: bool) -> str:
    return _one(chance, ODD if chance.random() < ODD_BLOCK * (3 if listed else 1) else PLAIN, data, listed)


def _wirings(chance: random.Random, data: str, blocks: int) -> Iterator[tuple[str, int, int]]:
    for _ in range(3):
        if chance.random() < WIRED:
            first, second = sorted(chance.sample(range(blocks), 2))
            name = _one(chance, WIRINGS, data, False)
            yield name, first, second


def _objective(chance: random.Random, parts: Mapping[str, Part], data: str, odd: float) -> str:
    """Draw a loss or an optimizer, seldom one that may be refused."""
    refused = chance.random() < odd
    return _one(chance, {n: p for n, p in parts.items() if bool(p.refusal) == refused}, data, False)


def _one(chance: random.Random, parts: Mapping[str, Part], data: str, listed: bool) -> str:
    fitting = [part for part in parts.values() if data in part.data and part.listed in (None, listed)]
    return chance.choices(fitting, [part.weight for part in fitting])[0].name


def smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Give recipes with one part less, or a plainer one."""
    for index in range(len(recipe.wirings)):
        yield replace(recipe, wirings=recipe.wirings[:index] + recipe.wirings[index + 1 :])
    plain = "convolution" if recipe.data == "images" else "linear"
    for index, name in enumerate(recipe.blocks):
        if name != plain:
            yield replace(recipe, blocks=(*recipe.blocks[:index], plain, *recipe.blocks[index + 1 :]))
    if recipe.samples != "dict" and not recipe.listed:
        yield replace(recipe, samples="dict")
    stem = {"vectors": "affine", "tokens": "embedding", "images": "patches"}[recipe.data]
    plainer: dict[str, object] = {
        "stem": stem,
        "loss": "cross_entropy",
        "optimizer": "momentum",
        "scheduler": None,
        "listed": False,
        "random_data": False,
        "collated": False,
        "accepted": False,
    }
    for name, value in plainer.items():
        if getattr(recipe, name) != value:
            yield replace(recipe, **{name: value})  # type: ignore[arg-type]


def write(recipe: Recipe) -> str:
    """Return the model file."""
    item, read, target = SAMPLES[recipe.samples].text.split("\n")
    optimizer = OPTIMIZERS[recipe.optimizer]
    named = "named_parameters" if "list(named_parameters)" in optimizer.text else "parameters"
    text = FRAME
    for name, value in {
        "RECIPE": repr(recipe),
        "CLASSES": "\n\n".join(
            f"class {_class(name)}(nn.Module):{BLOCKS[name].text.rstrip()}\n" for name in _used(recipe)
        ),
        "STEM": STEMS[recipe.stem].text,
        "BLOCKS": ", ".join(f"{_class(name)}(d)" for name in recipe.blocks),
        "INIT": _indented(_init(recipe), 8),
        "FORWARD": _indented(_forward(recipe), 8),
        "ITEM": item,
        "SAMPLE_X": DATASETS[recipe.data].text,
        "NOISE": "\n        x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype)" if _noisy(recipe) else "",
        "POOL": ".mean((-2, -1))" if recipe.data == "images" else "",
        "LABELS": "(4,)" if recipe.data == "tokens" else "()",
        "READ": read,
        "TARGET": target,
        "LOSS": _indented(LOSSES[recipe.loss].text, 4),
        "ARGUMENT": named,
        "OPTIMIZER": _indented(optimizer.text, 4),
        "WIDTH": str(WIDTH),
        "SEED": str(recipe.seed),
        "OPTIONAL": _optional(recipe),
    }.items():
        text = text.replace(f"<{name}>", value)
    return text


def _noisy(recipe: Recipe) -> bool:
    return recipe.random_data and recipe.data != "tokens"


def _used(recipe: Recipe) -> list[str]:
    return list(dict.fromkeys(recipe.blocks))


def _class(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _indented(text: str, spaces: int) -> str:
    return "\n".join(" " * spaces + line if line else line for line in text.strip("\n").split("\n"))


def _init(recipe: Recipe) -> str:
    lines = [_place(recipe, index, "init") for index in range(len(recipe.wirings))]
    return "\n".join(line for line in lines if line) or "pass"


def _forward(recipe: Recipe) -> str:
    """Return the lines between the model's input and its head."""
    places = range(len(recipe.wirings))
    lines = [_place(recipe, index, "first") for index in places] + ["h = self.inp(x)"]
    sources = {first for _, first, _ in recipe.wirings}
    for block in range(len(recipe.blocks)):
        lines.append(f"h = self.blocks[{block}](h)")
        lines += [_place(recipe, index, f"behind {block}") for index in places]
        if block in sources:
            lines.append(f"kept{block} = h")
    lines += [_place(recipe, index, "last") for index in places]
    spare = any(name == "unused_head" for name, _, _ in recipe.wirings)
    lines.append('return {"logits": self.head(h<POOL>), "spare": spare}' if spare else "return self.head(h<POOL>)")
    return "\n".join(line for line in lines if line)


def _place(recipe: Recipe, index: int, where: str) -> str:
    """Return a wiring's lines for one place, with names of its own."""
    name, first, second = recipe.wirings[index]
    own = r"\b(first_tied|second_tied|spare|scale|routes|route|positive|z|turned|saved|part|level|other|raw|back)\b"
    text = WIRINGS[name].text.replace("{a}", str(first)).replace("{b}", str(second))
    text = re.sub(own, lambda found: f"{found[1]}{index}" if name != "unused_head" else found[1], text)
    lines, here = [], False
    for line in text.split("\n"):
        if re.fullmatch(r"(init|first|last|behind \d+):", line):
            here = line == f"{where}:"
        elif here and line:
            lines.append(line)
    return "\n".join(lines)


def _optional(recipe: Recipe) -> str:
    """Return what a file need not have."""
    found = []
    if recipe.scheduler is not None:
        found.append(f"def scheduler(optimizer):\n    {SCHEDULERS[recipe.scheduler].text}\n")
    if recipe.collated:
        found.append("def collate(samples):\n    return torch.utils.data.default_collate(samples)\n")
    if "ignored_log" in recipe.blocks:
        found.append('ignored_state = ["blocks.*.ignored"]\n')
    if recipe.listed:
        found.append("def layers(model):\n    return [model.inp, *model.blocks, model.head]\n")
    return "\n\n".join(found)
