"""Target: another trainer, what it calls a model's parts, and what every export to it says of its plan.

Other trainers cut language models before blocks: the elements of one module list, between an embedding and a head.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from types import MappingProxyType
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster, Device
from autopar.formats.expressible import Expressible, grid_of
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.stage import chunks_of, layers_text, layout_of
from autopar.ownership import Replicas
from autopar.schedules import SCHEDULES

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
    sliced: bool = False
    """Whether devices that run a replica together keep slices of the sequence."""

    @property
    def options(self) -> dict[str, str | int]:
        """What is to be asked of the planner, by the names of its options."""
        found: dict[str, str | int] = {"stages": self.stages, "schedule": self.schedule}
        several = {"chunks": self.chunks} if self.chunks > 2 and layout_of(self.schedule) == "loop" else {}
        slices = "on" if self.sliced else None
        stated = {
            "batch": self.batch,
            "micro_batches": self.micro_batches,
            "shard": self.shard,
            "sequence_parallel": slices,
        }
        return {**found, **several, **{name: each for name, each in stated.items() if each is not None}}


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


def stages_text(sizes: Sequence[int], replicas: int, team: int = 1) -> str:
    """Return stages of so many layers as ``autopar plan --stages`` takes them, of replicas by so many devices each.

    >>> stages_text([5, 1], 2), stages_text([5, 1], 2, team=4)
    ('0-4:2,5:2', '0-4:2x4,5:2x4')

    Raises:
        UsageError: a stage has no layer.
    """
    if 0 in sizes:
        raise UsageError(f"stage {sizes.index(0)} has no layers, as no stage of autopar's may")
    ends, how = accumulate(sizes, initial=0), Replicas(replicas, team=team).text
    return ",".join(f"{layers_text(*each)}:{how}" for each in pairwise(ends))


class ExportFile(NamedTuple):
    """A file of an export."""

    name: str
    text: str


class ExportSubject(NamedTuple):
    """A plan that is exported, and what it was made of."""

    plan: Plan
    profile: Profile
    cluster: Cluster
    plan_file: str
    """What launches call the plan."""
    configuration: Mapping[str, object] = MappingProxyType({})
    """Of a Transformers model; empty for others."""
    schedule_file: str | None = None
    """What a schedule is written to, where the trainer takes one from a file."""
    notes: tuple[str, ...] = ()
    """What else is said of the plan."""

    @property
    def architecture(self) -> str | None:
        """The class of a Transformers model, as its configuration names it."""
        classes = self.configuration.get("architectures")
        first = classes[0] if isinstance(classes, list) and classes else None
        return first if isinstance(first, str) else None

    @property
    def blocks(self) -> tuple[str, ...]:
        """The layers that are blocks."""
        parts = parts_of(self.profile)
        return () if parts is None else parts.names(self.profile)


class Target(NamedTuple):
    """What plans are exported to."""

    version: str
    """That exports are written for and were tried with, such as ``torchtitan 0.3.0``."""
    trial: str
    """What was tried with it (`make exports`)."""
    file: str
    """Name of the main file, where none is asked for."""
    write: Callable[[ExportSubject, Target], Iterator[ExportFile]]
    """Makes the files, the main one first, which is called as the target says."""
    expressible: Expressible | None = None
    """What the trainer can express; None: any plan that autopar itself can run."""
    takes_schedule_file: bool = False
    names_refusal: Callable[[ExportSubject], str | None] = lambda subject: None
    """Why the trainer has no names for the plan's cuts; None where it has."""
    adjust: Callable[[Expressible, ExportSubject], Expressible] = lambda expressible, subject: expressible
    """What can be expressed of a plan's devices."""
    cuts_layers: bool = False
    """Whether stages may begin with any layer, and not only with blocks and what stands behind them."""

    def limits(self, subject: ExportSubject) -> Expressible | None:
        """Return what can be expressed: with a schedule in a file, any depth that a schedule may have."""
        if self.expressible is None:
            return None
        found = self.adjust(self.expressible, subject)
        if subject.schedule_file is None:
            return found
        return found._replace(schedules=tuple(SCHEDULES), any_depth=True, any_count=True)

    def edges(self, subject: ExportSubject) -> tuple[int, ...]:
        """Return the layers before which stages may begin, and how many layers there are."""
        count, parts = len(subject.profile.layers), parts_of(subject.profile)
        if self.cuts_layers:
            return tuple(range(count + 1))
        inner = () if parts is None else (*parts.blocks, parts.blocks.stop)
        return tuple(sorted({0, *inner, count}))

    def refusal(self, subject: ExportSubject) -> str | None:
        """Return why the plan cannot be exported, in one line; None where it can."""
        limits = self.limits(subject)
        if limits is None:
            return subject.plan.refusal
        why = limits.refusal(subject.plan, subject.blocks, usual_depths(subject.plan))
        return why or self.names_refusal(subject)


def usual_depths(plan: Plan) -> list[tuple[int, ...]]:
    """Return how many micro-batches every stage has in flight by the schedule itself, as other trainers run it."""
    grid, chunks = grid_of(plan), len(plan.groups[0])
    depths = SCHEDULES[plan.schedule].warmups(grid.groups, chunks, grid.micro_batches)
    return [next(iter(depths.values()))]


def heading(subject: ExportSubject, target: Target) -> list[str]:
    """Return what every export says first, as lines without marks of a comment."""
    plan, grid = subject.plan, grid_of(subject.plan)
    chunks = chunks_of(layout_of(plan.schedule)) != 1 and f", {len(plan.groups[0])} of them a device"
    tokens = "" if plan.model.sequence is None else f"; tokens of a sample: {plan.model.sequence}"
    each = "" if grid.tensor == 1 else f", {grid.tensor} devices each"
    origin, predicted, *hosts = launch_heading(subject, target)
    shape = (
        f"stages: {len(plan.stages)}{chunks or ''}; replicas: {grid.pipelines}{each}; schedule: {plan.schedule}; "
        f"micro-batches: {grid.micro_batches} of {grid.rows}; batch: {plan.batch}{tokens}"
    )
    return [origin, shape, predicted, *hosts, *subject.notes]


def launch_heading(subject: ExportSubject, target: Target) -> list[str]:
    """Return what every launch of autopar's own ranks says first."""
    plan = subject.plan
    peaks = ", ".join(f"{each / 2**30:.3g} GiB" for each in plan.predicted.peak_bytes)
    found = [
        f"{plan.model.source}, planned by autopar. Written for {target.version}: {target.trial}.",
        f"predicted: step {plan.predicted.step_s:.4g} s, bubble {plan.predicted.bubble:.1%}, peak memory {peaks}",
    ]
    if len(nodes_of(subject)) > 1:
        found.append(f"hosts, in the order of ranks: {_hosts_text(subject)}")
    return found


def _hosts_text(subject: ExportSubject) -> str:
    """Return which devices of which nodes the ranks are on, in their order.

    >>> from types import SimpleNamespace as Some
    >>> devices = [Some(node=1, type="V100"), Some(node=1, type="V100"), Some(node=0, type="H100")]
    >>> _hosts_text(Some(plan=Some(devices=(0, 1, 2)), cluster=Some(devices=devices)))
    '2 x V100 (node 1), 1 x H100 (node 0)'
    """
    runs = groupby((each.node, each.type) for each in _devices_of(subject))
    return ", ".join(f"{len(list(same))} x {name} (node {node})" for (node, name), same in runs)


def equal_nodes(subject: ExportSubject) -> tuple[int, int]:
    """Return how many machines there are, and the ranks of each.

    Raises:
        UsageError: they differ.
    """
    counts = nodes_of(subject)
    if len(set(counts)) > 1:
        raise UsageError(f"machines have {', '.join(map(str, counts))} ranks, and this launcher starts as many on each")
    return len(counts), counts[0]


def comment(lines: Sequence[str]) -> str:
    """Return lines as a comment of Python, shells and YAML, each at most 120 characters where words allow it."""
    import textwrap

    return "".join(f"{each}\n" for line in lines for each in textwrap.wrap(f"# {line}", 120, subsequent_indent="#   "))


def modules_of_stage(subject: ExportSubject, stage: int) -> tuple[str, ...]:
    """Return the modules of a stage's layers, in their order.

    Raises:
        UsageError: a module is called several times, so that it has no one stage.
    """
    position = {layer.name: layer for layer in subject.profile.layers}
    found = [module for name in subject.plan.stages[stage].layers for module in position[name].modules]
    for module in found:
        if "@" in module:
            raise UsageError(
                f"stage {stage} begins or holds call {module!r}: a module that is called twice has no name"
            )
    return tuple(found)


def nodes_of(subject: ExportSubject) -> list[int]:
    """Return how many ranks every machine has, in the order of their first ones."""
    return list(Counter(each.node for each in _devices_of(subject)).values())


def _devices_of(subject: ExportSubject) -> list[Device]:
    """Return the devices of the ranks, in their order."""
    listed = subject.cluster.devices
    # A plan may have more devices than the cluster lists: they are like those, in turn.
    return [listed[device % len(listed)] for device in subject.plan.devices]
