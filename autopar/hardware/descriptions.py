"""Descriptions: what a cluster file in TOML may say, and what a name says as well."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from autopar.errors import UsageError
from autopar.formats.document import (
    MOST_RANKS,
    Index,
    Name,
    Record,
    each_once,
    fault,
    first_fault,
    parse_bandwidth,
    parse_bytes,
)
from autopar.hardware.fabrics import FABRICS, Fabric, find_fabric
from autopar.hardware.gpus import Architecture, Gpu, find, implausible, is_known

PER = re.compile(r"(?P<rate>.*?)\s*/\s*(?P<of>gpu|device|node)\s*", re.IGNORECASE)
_FLOPS = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>[GTP])FLOP(?:/s|S)", re.IGNORECASE)
_UNITS = {"G": 1e9, "T": 1e12, "P": 1e15}


def _readable(read: Callable[[str], object]) -> AfterValidator:
    """Return what refuses texts that cannot be read; :func:`first_fault` says why."""

    def check(text: str) -> str:
        try:
            read(text)
        except UsageError as error:
            raise PydanticCustomError("fault", "{message}", {"message": str(error).strip()}) from error
        return text

    return AfterValidator(check)


class Rate(NamedTuple):
    """A bandwidth in one direction."""

    bytes_per_s: float
    per_device: bool
    """Whether each device has it for itself (``400Gbps/gpu``), or all of a node together."""


def rate_of(text: str) -> Rate:
    """Read a bandwidth of a node, or with ``/gpu`` of each device.

    Raises:
        UsageError: it is not a bandwidth.
    """
    match = PER.fullmatch(text.strip())
    rate = parse_bandwidth(text if match is None else match["rate"], "")
    return Rate(rate, match is not None and match["of"].casefold() != "node")


def flops_of(text: str) -> float:
    """Read operations per second.

    >>> flops_of("989TFLOP/s"), flops_of("2.25 PFLOPS")
    (989000000000000.0, 2250000000000000.0)

    Raises:
        UsageError: it is not a rate.
    """
    match = _FLOPS.fullmatch(text.strip())
    if match is None or not float(match["number"]):
        raise UsageError(f"{text[:80]!r}: write operations per second, such as 989TFLOP/s")
    return float(match["number"]) * _UNITS[match["unit"].upper()]


def network_fabric(name: str) -> Fabric:
    """Return the fabric of a network.

    Raises:
        UsageError: it is not known, or joins devices in a node.
    """
    found = find_fabric(name)
    if not found.is_network:
        networks = ", ".join(fabric.name for fabric in FABRICS if fabric.is_network)
        raise UsageError(f"{name[:80]!r} joins the devices of a node, and no nodes; write one of {networks}")
    return found


_Size = Annotated[str, _readable(partial(parse_bytes, flag=""))]
_Bandwidth = Annotated[str, _readable(partial(parse_bandwidth, flag=""))]
_Flops = Annotated[str, _readable(flops_of)]
_FIELDS = {
    "fp32_flops_per_s": "fp32",
    "fp16_flops_per_s": "fp16",
    "bf16_flops_per_s": "bf16",
    "memory_bytes": "memory",
    "memory_bytes_per_s": "memory_bandwidth",
    "nvlink_bytes_per_s": "link",
    "peer_bytes_per_s": "peer",
    "pcie_bytes_per_s": "host",
    "collective_bytes_per_s": "collectives",
}
"""What a GPU's numbers are called in a file."""


def _bandwidth(text: str | None) -> float | None:
    return None if text is None else parse_bandwidth(text, "")


class GpuDescription(Record):
    """A GPU of your own, which nodes name. Rates are dense peaks, bandwidths those of one direction."""

    name: Name
    """As ``torch.cuda.get_device_name()`` says it, so that runs on it match."""
    architecture: Architecture
    """Whose attention kernels it has, and whose shares of its rates it reaches."""
    fp32: _Flops
    """Of matrix products in float32, such as ``67TFLOP/s``."""
    fp16: _Flops
    """In float16, added up in float32; as of float32 where that is no quicker."""
    bf16: _Flops | None = None
    """In bfloat16; null: it does not compute in it."""
    memory: _Size
    """Such as ``80GB``."""
    memory_bandwidth: _Bandwidth
    """Such as ``3.35TB/s``."""
    link: _Bandwidth | None = None
    """To all other GPUs of its node, such as ``450GB/s``; null: there is only PCIe."""
    peer: _Bandwidth | None = None
    """Of that, what one other GPU can be sent; null: all."""
    host: _Bandwidth
    """To the host: PCIe, such as ``63GB/s``."""
    collectives: _Bandwidth | None = None
    """Bus bandwidth that collectives reach in a node; null: a share of its links."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """In any one currency."""
    power_w: float | None = Field(default=None, gt=0, lt=1e6)
    """Of its board under load."""
    source: Name | None = None
    """Where the numbers are from."""

    @cached_property
    def kind(self) -> Gpu:
        """What the description says, as of GPUs that are known."""
        return Gpu(
            name=self.name,
            aliases=(),
            architecture=self.architecture,
            fp32_flops_per_s=flops_of(self.fp32),
            fp16_flops_per_s=flops_of(self.fp16),
            bf16_flops_per_s=None if self.bf16 is None else flops_of(self.bf16),
            memory_bytes=parse_bytes(self.memory, ""),
            memory_bytes_per_s=parse_bandwidth(self.memory_bandwidth, ""),
            nvlink_bytes_per_s=_bandwidth(self.link) or 0.0,
            peer_bytes_per_s=_bandwidth(self.peer),
            pcie_bytes_per_s=parse_bandwidth(self.host, ""),
            collective_bytes_per_s=_bandwidth(self.collectives),
            power_w=self.power_w,
            source=self.source or "a cluster file",
        )

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if is_known(self.name) or self.name.casefold() in ("cpu", "cuda", "auto"):
            fault("name", f"{self.name!r} is known already; call yours otherwise, or leave it out and name that one")
        for name, message in implausible(self.kind):
            fault(_FIELDS[name], message)
        return self


class NodesDescription(Record):
    """Nodes that are alike."""

    count: int = Field(default=1, ge=1, le=MOST_RANKS)
    """How many."""
    gpus: int = Field(ge=1, le=MOST_RANKS)
    """In each node."""
    gpu: Name
    """Any of ``autopar cluster list``, or of this file's ``[[gpu]]``."""
    memory: _Size | None = None
    """Of a GPU, such as ``70GB``, in place of its data sheet's."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Of a GPU."""
    power_w: float | None = Field(default=None, gt=0, lt=1e6)
    """Of a GPU's board under load, in place of its data sheet's."""
    bandwidth: Annotated[str, _readable(rate_of)] | None = None
    """Bus bandwidth of collectives in the node, such as ``200GB/s``, in place of its data sheet's; or that of each
    GPU's links, such as ``400Gbps/gpu``, of which collectives reach a part."""
    rack: Index = 0
    """Which rack they are in."""


class NetworkDescription(Record):
    """What connects nodes or racks."""

    bandwidth: Annotated[str, _readable(rate_of)]
    """Of a node, in one direction, such as ``100Gbps``; ``100Gbps/gpu``: of each GPU for itself."""
    latency_s: float = Field(default=0.0, ge=0, lt=10)
    """Of a message, beyond NCCL's own."""
    fabric: Annotated[str, _readable(network_fabric)] | None = None
    """Whose measured collectives are taken: ``infiniband``, ``efa`` or ``roce``; null: those of a formula."""


class ClusterDescription(Record):
    """A cluster in TOML. Where nodes differ, links and collectives are those of the slowest."""

    name: Name | None = None
    """Null: the file's name."""
    gpu: tuple[GpuDescription, ...] = ()
    """One table ``[[gpu]]`` for each kind that is not in ``autopar cluster list``."""
    nodes: Annotated[tuple[NodesDescription, ...], Field(min_length=1)]
    """One table ``[[nodes]]`` for each kind of node."""
    network: NetworkDescription | None = None
    """``[network]``, required where there are several nodes."""
    rack: NetworkDescription | None = None
    """``[rack]``: between the nodes of a rack, required where there are several, which ``network`` connects."""

    def kind_of(self, name: str) -> Gpu:
        """Return the GPU of a name.

        Raises:
            UsageError: neither this file describes it nor is it known.
        """
        own = next((each.kind for each in self.gpu if each.name == name), None)
        return own or find(name)

    @model_validator(mode="after")
    def _gpus_are_known(self) -> Self:
        each_once((each.name for each in self.gpu), "gpu[{}].name", "name")
        for index, each in enumerate(self.nodes):
            try:
                self.kind_of(each.gpu)
            except UsageError as error:
                fault(f"nodes[{index}].gpu", str(error))
        return self

    @model_validator(mode="after")
    def _all_are_connected(self) -> Self:
        devices = sum(each.count * each.gpus for each in self.nodes)
        if devices > MOST_RANKS:
            fault("nodes", f"{devices} devices; at most {MOST_RANKS} can be planned for")
        racks = {each.rack for each in self.nodes}
        if len(racks) > 1 and self.rack is None:
            fault("rack", 'nodes in several racks need a [rack] with a bandwidth, such as "400Gbps"')
        apart = len(racks) if self.rack is not None else sum(each.count for each in self.nodes)
        if apart > 1 and self.network is None:
            what = "racks" if self.rack is not None else "nodes"
            fault("network", f'several {what} need a [network] with a bandwidth, such as "200Gbps"')
        return self

    @classmethod
    def of(cls, content: object) -> Self:
        """Return what a file or a name says.

        Raises:
            UsageError: it is not sound; names the key.
        """
        try:
            # By way of JSON, in which tuples are lists and nothing else is loose.
            text = json.dumps(content, default=str)
        except ValueError as error:
            raise UsageError("$: holds a huge number") from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise UsageError(first_fault(error, json.loads(text))) from error


def line_of(text: str, content: object, at: str) -> int | None:
    """Return the line of a TOML file on which a JSON path ends, or the table that lacks it begins.

    >>> text = "a = 1\\nb = [1, 2]"
    >>> line_of(text, tomllib.loads(text), "$.b[1]"), line_of(text, tomllib.loads(text), "$.c")
    (2, None)
    """
    path: list[str | int] = [int(index) if index else name for name, index in _STEP.findall(at)]
    while path and not _reaches(content, path):
        path.pop()
    lines = text.splitlines()
    if not path or len(lines) > _MOST_LINES:
        return None
    return next((count for count in range(1, len(lines) + 1) if _reaches(_read("\n".join(lines[:count])), path)), None)


_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_MOST_LINES = 500
"""Of a file, of which a line is sought by reading it as often."""


def _read(text: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _reaches(content: Any, path: Sequence[str | int]) -> bool:  # noqa: ANN401
    """Whether there is something at a path."""
    for part in path:
        if isinstance(part, str) and (not isinstance(content, dict) or part not in content):
            return False
        if isinstance(part, int) and (not isinstance(content, list) or part >= len(content)):
            return False
        content = content[part]
    return True
