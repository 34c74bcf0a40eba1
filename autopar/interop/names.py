"""Names: what models and other trainers call the parts of a language model, and which layers are blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopar.formats.profile import Profile

_ELEMENT = re.compile(r"(?P<list>.+)\.(?P<index>[0-9]+)")


class ModelNames(NamedTuple):
    """Models whose parts go by the same names."""

    embedding: tuple[str, ...]
    blocks: str
    norm: str
    head: str


LLAMA_LIKE = ModelNames(("model.embed_tokens",), "model.layers", "model.norm", "lm_head")
GPT_LIKE = ModelNames(("transformer.wte", "transformer.wpe"), "transformer.h", "transformer.ln_f", "lm_head")
FAMILIES = {
    "LlamaForCausalLM": LLAMA_LIKE,
    "MistralForCausalLM": LLAMA_LIKE,
    "Qwen2ForCausalLM": LLAMA_LIKE,
    "Qwen3ForCausalLM": LLAMA_LIKE,
    "GPT2LMHeadModel": GPT_LIKE,
}
"""By the class of a Transformers model."""
BLOCKS = {
    "LlamaForCausalLM": "LlamaDecoderLayer",
    "MistralForCausalLM": "MistralDecoderLayer",
    "Qwen2ForCausalLM": "Qwen2DecoderLayer",
    "Qwen3ForCausalLM": "Qwen3DecoderLayer",
    "GPT2LMHeadModel": "GPT2Block",
}
"""The class of such a model's blocks."""


class ModelParts(NamedTuple):
    """A model's layers, by index: what stands before its blocks, these, and what stands behind."""

    before: range
    blocks: range
    behind: range
    blocks_list: str
    """The module list that holds the blocks."""

    def names(self, profile: Profile) -> tuple[str, ...]:
        """Return the blocks' layers."""
        return tuple(profile.layers[index].name for index in self.blocks)


def parts_of(profile: Profile) -> ModelParts | None:
    """Return a model's parts; None where no module list makes an unbroken run of layers, one block a layer.

    Of several module lists the longest counts.
    """
    elements = [_element(layer.modules) for layer in profile.layers]
    counts = Counter(each[0] for each in elements if each is not None)
    if not counts:
        return None
    longest = counts.most_common(1)[0][0]
    own = [index for index, each in enumerate(elements) if each is not None and each[0] == longest]
    numbers = [each[1] for each in elements if each is not None and each[0] == longest]
    if own != list(range(own[0], own[-1] + 1)) or numbers != list(range(len(own))):
        return None
    stop = own[-1] + 1
    return ModelParts(range(own[0]), range(own[0], stop), range(stop, len(elements)), longest)


def _element(modules: Sequence[str]) -> tuple[str, int] | None:
    """Return the module list, and the place in it, of a layer that is one of its elements.

    >>> _element(["model.layers.3"]), _element(["wte", "wpe"]), _element(["h.0.attn"])
    (('model.layers', 3), None, None)
    """
    match = _ELEMENT.fullmatch(modules[0]) if len(modules) == 1 else None
    return None if match is None else (match["list"], int(match["index"]))


def family_of(profile: Profile, architecture: str | None) -> ModelNames | None:
    """Return the family of a model's class, if it is known and the model's layers go by its names."""
    family = FAMILIES.get(architecture or "")
    parts = parts_of(profile)
    if family is None or parts is None or parts.blocks_list != family.blocks:
        return None
    before = tuple(modules_of(profile, parts.before))
    behind = tuple(modules_of(profile, parts.behind))
    return family if before == family.embedding and behind == (family.norm, family.head) else None


def modules_of(profile: Profile, layers: range) -> Iterator[str]:
    """Yield the modules of some layers, in their order."""
    for index in layers:
        yield from profile.layers[index].modules


def rename(module: str, family: ModelNames, other: ModelNames) -> str:
    """Return what another family calls a module.

    >>> rename("transformer.h.3", GPT_LIKE, LLAMA_LIKE), rename("lm_head", GPT_LIKE, LLAMA_LIKE)
    ('model.layers.3', 'lm_head')
    """
    if module.startswith(f"{family.blocks}."):
        return other.blocks + module.removeprefix(family.blocks)
    known = {family.norm: other.norm, family.head: other.head, family.embedding[0]: other.embedding[0]}
    return known[module]
