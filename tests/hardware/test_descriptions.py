"""GPUs of one's own: what a cluster file says of them is what is planned and estimated with, or is refused."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster
from autopar.hardware.clusters import cluster_named, gpus_of, parse_cluster, read_cluster
from autopar.hardware.descriptions import ClusterDescription, GpuDescription, flops_of
from autopar.hardware.gpus import GPUS, Architecture, Gpu, find, implausible, power_of

OWN = """
[[gpu]]
name = "Lab X1"
architecture = "hopper"
fp32 = "60TFLOP/s"
fp16 = "800TFLOP/s"
bf16 = "0.8PFLOP/s"
memory = "96GB"
memory_bandwidth = "4TB/s"
link = "450GB/s"
host = "63GB/s"
collectives = "370GB/s"
price_per_hour = 3
power_w = 600

[[nodes]]
count = 2
gpus = 8
gpu = "Lab X1"

[network]
bandwidth = "400Gbps/gpu"
fabric = "efa"
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "lab.toml"
    path.write_text(text)
    return path


def _described(gpu: Gpu, name: str) -> dict[str, object]:
    """What a file would say of a GPU that is known."""
    said = {
        "link": gpu.nvlink_bytes_per_s,
        "peer": gpu.peer_bytes_per_s,
        "host": gpu.pcie_bytes_per_s,
        "collectives": gpu.collective_bytes_per_s,
        "memory_bandwidth": gpu.memory_bytes_per_s,
    }
    rates = {"fp32": gpu.fp32_flops_per_s, "fp16": gpu.fp16_flops_per_s, "bf16": gpu.bf16_flops_per_s}
    return {
        "name": name,
        "architecture": gpu.architecture,
        "memory": str(gpu.memory_bytes),
        "power_w": gpu.power_w,
        **{key: f"{each / 1e9:f}GB/s" for key, each in said.items() if each},
        **{key: f"{each / 1e12:f}TFLOP/s" for key, each in rates.items() if each},
    }


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_of_the_table_may_be_described_and_is_then_the_same(gpu: Gpu) -> None:
    assert list(implausible(gpu)) == []
    description = GpuDescription.model_validate_strings({k: str(v) for k, v in _described(gpu, "mine").items()})
    same = replace(gpu, name="mine", aliases=(), fabric=None, domain=8, source=description.kind.source)
    assert description.kind == same


def test_a_described_gpu_is_a_cluster_of_its_memory_price_power_and_links(tmp_path: Path) -> None:
    path = _file(tmp_path, OWN)
    cluster = read_cluster(path)
    device = cluster.devices[0]
    assert (device.type, device.memory_bytes, device.price_per_hour) == ("Lab X1", 96 * 10**9, 3.0)
    assert (device.power_w, power_of(device)) == (600.0, 600.0)
    assert cluster.links == cluster_named("2x8xH100:400Gbps/gpu").links
    assert any("efa" in note for note in cluster.notes)
    (gpu,) = gpus_of(path)
    assert (gpu.name, gpu.bf16_flops_per_s, gpu.fp32_flops_per_s) == ("Lab X1", 800e12, 60e12)
    cluster.save(tmp_path / "cluster.json")
    assert read_cluster(tmp_path / "cluster.json") == cluster
    own = OWN.replace('gpu = "Lab X1"', 'gpu = "Lab X1"\nprice_per_hour = 9\npower_w = 450\nmemory = "90GB"', 1)
    device = read_cluster(_file(tmp_path, own)).devices[0]
    assert (device.price_per_hour, device.power_w, device.memory_bytes) == (9.0, 450.0, 90 * 10**9)


def test_power_is_left_out_of_files_that_do_not_say_it() -> None:
    cluster = cluster_named("2xH100")
    assert "power_w" not in cluster.dumps()
    assert power_of(cluster.devices[0]) == 700
    assert Cluster.parse(cluster.dumps(), Path("cluster.json")) == cluster


@given(
    architecture=st.sampled_from(get_args(Architecture)),
    fp32=st.integers(1, 200),
    times=st.integers(1, 16),
    per_byte=st.floats(10, 1000),
    whole_s=st.floats(0.005, 0.5),
    host=st.integers(1, 100),
    joined=st.booleans(),
)
def test_random_gpus_are_read_as_they_are_written(
    architecture: Architecture, fp32: int, times: int, per_byte: float, whole_s: float, host: int, joined: bool
) -> None:
    fp16 = fp32 * times * 10**12
    rate = round(fp16 / per_byte / 1e9) or 1
    memory = round(rate * whole_s) or 1
    link = f'link = "{2 * host}GB/s"\ncollectives = "{host}GB/s"\n' if joined else ""
    text = (
        f'[[gpu]]\nname = "mine"\narchitecture = "{architecture}"\n'
        f'fp32 = "{fp32}TFLOP/s"\nfp16 = "{fp32 * times} tflops"\n'
        f'memory = "{memory}GB"\nmemory_bandwidth = "{rate}GB/s"\n{link}host = "{host}GB/s"\n'
        '[[nodes]]\ngpus = 4\ngpu = "mine"\n'
    )
    if not 0.001 <= memory / rate <= 1 or not 4 <= fp16 / (rate * 1e9) <= 4000:
        return
    cluster = parse_cluster(text, Path("lab.toml"))
    assert {device.memory_bytes for device in cluster.devices} == {memory * 10**9}
    kind = ClusterDescription.of(
        {"gpu": [_described(find("T4"), "other")], "nodes": [{"gpus": 1, "gpu": "other"}]}
    ).kind_of("other")
    assert kind.memory_bytes == find("T4").memory_bytes
    assert (cluster.links[0].bytes_per_s == host * 1e9) == joined


@pytest.mark.parametrize(
    ("old", "new", "message", "line"),
    [
        ('name = "Lab X1"', 'name = "h100"', "$.gpu[0].name: 'h100' is known already; call yours otherwise", 3),
        ('name = "Lab X1"', 'name = "cuda"', "$.gpu[0].name: 'cuda' is known already", 3),
        ('architecture = "hopper"', 'architecture = "tpu"', "$.gpu[0].architecture: ", 4),
        ('fp32 = "60TFLOP/s"', "", "$.gpu[0].fp32: Field required", 2),
        ('fp32 = "60TFLOP/s"', 'fp32 = "60"', "$.gpu[0].fp32: '60': write operations per second, such as", 5),
        ('fp32 = "60TFLOP/s"', 'fp32 = "900TFLOP/s"', "$.gpu[0].fp16: less than of float32; write the same", 6),
        ('bf16 = "0.8PFLOP/s"', 'bf16 = "8TFLOP/s"', "$.gpu[0].bf16: less than of float32; leave it out", 7),
        ('memory = "96GB"', 'memory = "96TB"', "$.gpu[0].memory: all of it would be read in 24 s; write", 8),
        ('"4TB/s"', '"4GB/s"', "$.gpu[0].memory_bandwidth: 2e+05 operations for each byte; write", 9),
        ('link = "450GB/s"', 'link = "50GB/s"', "$.gpu[0].link: no more than to the host; leave it out", 10),
        ('"450GB/s"', '"450GB/s"\npeer = "1TB/s"', "$.gpu[0].peer: more than all its links carry; write", 11),
        ('"370GB/s"', '"900GB/s"', "$.gpu[0].collectives: more than its links carry in one direction; write", 12),
        ("power_w = 600", "power_w = 0", "$.gpu[0].power_w: ", 14),
        ("power_w = 600", 'power_w = 600\ncolour = "red"', "$.gpu[0].colour: ", 15),
        ('gpu = "Lab X1"', 'gpu = "Lab X2"', "$.nodes[0].gpu: no GPU called 'Lab X2' is known", 19),
        ('fabric = "efa"', 'fabric = "nvlink4"', "$.network.fabric: 'nvlink4' joins the devices of a node", 23),
        ('fabric = "efa"', 'fabric = "rocky"', "$.network.fabric: no fabric called 'rocky' is known", 23),
    ],
)
def test_a_wrong_number_is_refused_by_key_line_and_what_to_write(
    tmp_path: Path, old: str, new: str, message: str, line: int
) -> None:
    assert old in OWN
    with pytest.raises(FileError) as caught:
        read_cluster(_file(tmp_path, OWN.replace(old, new, 1)))
    assert message in str(caught.value)
    assert str(caught.value).endswith(f"(at line {line})")


def test_two_gpus_of_a_name_are_refused(tmp_path: Path) -> None:
    own, rest = OWN.split("[[nodes]]")
    with pytest.raises(FileError, match=r"\$.gpu\[1\].name: .*Lab X1"):
        read_cluster(_file(tmp_path, f"{own}{own}[[nodes]]{rest}"))


@pytest.mark.parametrize(
    "text", ["", "60", "60TFLOP", "0TFLOP/s", "60 T FLOP/s", "-1TFLOP/s", "1e3TFLOP/s", "60FLOP/s"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write operations per second, such as 989TFLOP/s"):
        flops_of(text)
