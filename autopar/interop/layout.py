"""Layout: which layers of a language model are blocks, what trainers call its parts, and Megatron's text of its stages.

In such a text as ``Et*7|(t*8|)*2t*9L``, ``E`` is the embedding, ``t`` a block, ``L`` the head with the loss; ``|`` ends
a stage. ``x*n`` is n times x, and so is ``(...)*n``, whatever stands in it; commas say nothing.
(`megatron.core.transformer.pipeline_parallel_layer_layout`, ``PipelineParallelLayerLayout.parse_str_to_list``.)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.formats.plan import Plan, layout_of
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


_GROUP = re.compile(r"\(([^()]+)\)\*([0-9]{1,4})")
_REPEATED = re.compile(r"(.)\*([0-9]{1,4})")
_MOST = 10_000
"""More letters than any layout has, or means."""


class DictatedStages(NamedTuple):
    """Somebody's stages, as ``autopar plan`` takes them."""

    stages: str
    """Layers and replicas, such as ``0-5:2,6-11:2``."""
    schedule: str
    chunks: int = 1
    """Stages that a device runs in turn."""
    micro_batches: int | None = None
    batch: int | None = None
    shard: str | None = None

    @property
    def options(self) -> dict[str, str | int]:
        """What is to be asked of the planner, by the names of its options."""
        found: dict[str, str | int] = {"stages": self.stages, "schedule": self.schedule}
        several = {"chunks": self.chunks} if self.chunks > 2 and layout_of(self.schedule) == "loop" else {}
        stated = {"batch": self.batch, "micro_batches": self.micro_batches, "shard": self.shard}
        return {**found, **several, **{name: each for name, each in stated.items() if each is not None}}


def unfold(text: str) -> list[str]:
    """Return the letters of every stage.

    >>> unfold("Et*2|(t*3|)*2tL")
    ['Ett', 'ttt', 'ttt', 'tL']

    Raises:
        UsageError: the text is no layout.
    """
    plain = text.replace(",", "")
    for pattern in (_GROUP, _REPEATED):
        if len(plain) < _MOST:
            plain = pattern.sub(lambda match: match[1] * int(match[2]), plain)
    stages = plain.split("|")
    strange = next((each for each in plain if each not in "EtL|"), None)
    if strange is not None or len(plain) >= _MOST:
        what = "is too long" if len(plain) >= _MOST else f"has {strange!r}; autopar knows E, t and L"
        raise UsageError(f"the layout {text[:80]!r} {what}")
    whole = "".join(stages)
    if not re.fullmatch("Et+L", whole):
        raise UsageError(f"the layout {text[:80]!r} must have one E first, one L last, and t between them")
    return stages


def fold(stages: Sequence[str]) -> str:
    """Return the short text of stages' letters.

    >>> fold(["Ett", "ttt", "ttt", "tL"]), fold(["E", "t", "L"])
    ('Ett|(t*3|)*2tL', 'E|t|L')
    """
    last = len(stages) - 1
    ended = [_short(letters) + ("|" if at < last else "") for at, letters in enumerate(stages)]
    runs = ((each, len(list(same))) for each, same in groupby(ended))
    return "".join(each if count == 1 else f"({each})*{count}" for each, count in runs)


def _short(letters: str) -> str:
    runs = ((each, len(list(same))) for each, same in groupby(letters))
    return "".join(each * count if count < 3 else f"{each}*{count}" for each, count in runs)


def letters_of(plan: Plan, profile: Profile, parts: ModelParts) -> list[str]:
    """Return the letters of a plan's stages."""
    first = dict.fromkeys((profile.layers[index].name for index in parts.before[:1]), "E")
    last = dict.fromkeys((profile.layers[index].name for index in parts.behind[-1:]), "L")
    letter = {**dict.fromkeys(parts.names(profile), "t"), **first, **last}
    return ["".join(letter.get(name, "") for name in stage.layers) for stage in plan.stages]


def ends_refusal(plan: Plan, parts: ModelParts | None) -> str | None:
    """Return why a plan's cuts have no name: a model without blocks, or a cut among what stands around them."""
    if parts is None or not parts.before or not parts.behind:
        return (
            "the profile's layers are no blocks of one list between an embedding and a head, so that cuts have no name"
        )
    for at, cut in enumerate(accumulate(len(stage.layers) for stage in plan.stages)):
        if 0 < cut < parts.before.stop or parts.behind.start < cut < parts.behind.stop:
            return f"stage {at} ends within the layers around the blocks, which other trainers do not cut"
    return None


def import_layout(text: str, profile: Profile, replicas: int = 1, groups: int | None = None) -> DictatedStages:
    """Return the stages that a layout of Megatron's means of a profile's layers.

    Args:
        text: the layout.
        profile: of the model.
        replicas: pipelines beside each other (Megatron's data-parallel size).
        groups: devices of a pipeline (its pipeline-parallel size); None: one for every stage.

    Raises:
        UsageError: the text is no layout, or not of so many layers, or the devices do not divide its stages.
    """
    letters, parts = unfold(text), parts_of(profile)
    if parts is None or not parts.before or not parts.behind:
        raise UsageError("the profile's layers are no blocks of one list between an embedding and a head")
    count = sum(each.count("t") for each in letters)
    if count != len(parts.blocks):
        raise UsageError(f"the layout has {count} blocks, and the profile {len(parts.blocks)}")
    sizes = [
        each.count("t") + ("E" in each) * len(parts.before) + ("L" in each) * len(parts.behind) for each in letters
    ]
    groups = groups or len(letters)
    if len(letters) % groups:
        raise UsageError(f"{groups} devices do not divide the layout's {len(letters)} stages")
    chunks = len(letters) // groups
    schedule = "1f1b" if chunks == 1 else "interleaved"
    return DictatedStages(stages_text(sizes, replicas), schedule, chunks)


def stages_text(sizes: Sequence[int], replicas: int) -> str:
    """Return stages of so many layers as ``autopar plan --stages`` takes them.

    >>> stages_text([5, 1], 2)
    '0-4:2,5:2'

    Raises:
        UsageError: a stage has no layer.
    """
    return ",".join(_ranges(sizes, replicas))


def _ranges(sizes: Sequence[int], replicas: int) -> Iterator[str]:
    for at, (size, stop) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        if not size:
            raise UsageError(f"stage {at} has no layers, as no stage of autopar's may")
        yield f"{stop - 1}:{replicas}" if size == 1 else f"{stop - size}-{stop - 1}:{replicas}"
