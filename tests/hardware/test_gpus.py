"""The table of known GPUs: names, units, and what is said of unknown ones."""

import json
import os
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.hardware.gpus import GPUS, Gpu, find


def test_no_name_means_two_gpus_and_unknown_ones_get_the_nearest() -> None:
    names = [name.casefold().replace("-", "").replace(" ", "") for gpu in GPUS for name in {gpu.name, *gpu.aliases}]
    assert len(names) == len(set(names))
    with pytest.raises(UsageError, match=r"no GPU called 'H10O-SXM' is known; the nearest are H100-SXM"):
        find("H10O-SXM")
    with pytest.raises(UsageError, match="known are V100-SXM2-32G, T4, A100-SXM-80G"):
        find("abacus")
    assert find("V100").flops_per_s("fp16") == 125e12
    with pytest.raises(UsageError, match="V100-SXM2-32G has no bfloat16; use one of fp32, fp16"):
        find("V100").flops_per_s("bf16")
    with pytest.raises(UsageError, match="no known rate in fp64"):
        find("H100").flops_per_s("fp64")


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_numbers_are_plausible_and_have_sources(gpu: Gpu) -> None:
    assert 5e12 < gpu.fp32_flops_per_s <= gpu.fp16_flops_per_s < 1e16
    assert 5e9 < gpu.memory_bytes < 1e12
    assert 1e11 < gpu.memory_bytes_per_s < 1e13
    assert gpu.nvlink_bytes_per_s == 0 or gpu.nvlink_bytes_per_s > gpu.pcie_bytes_per_s
    if gpu.collective_bytes_per_s is not None:
        assert gpu.collective_bytes_per_s <= (gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s)
    assert gpu.bf16_flops_per_s in (None, gpu.fp16_flops_per_s)
    assert (gpu.bf16_flops_per_s is None) == (gpu.architecture in ("pascal", "volta", "turing"))
    # What a step moves for each operation, and what an operation costs, are of the same order for all of them.
    assert 20 < gpu.fp16_flops_per_s / gpu.memory_bytes_per_s < 500
    assert gpu.peer_bytes_per_s is None or gpu.peer_bytes_per_s <= gpu.nvlink_bytes_per_s / 6
    assert gpu.power_w is not None
    assert 50 < gpu.power_w < 1500
    assert 2e10 < gpu.fp16_flops_per_s / gpu.power_w < 4e12
    assert gpu.domain > 1
    assert len(gpu.source) > 20


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "H100-SXM"),
        ("h100_sxm", "H100-SXM"),
        ("A100", "A100-SXM-80G"),
        ("a100 40gb", "A100-SXM-40G"),
        ("4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("V100", "V100-SXM2-32G"),
        ("B300", "B300-HGX"),
        ("GB200 NVL72", "GB200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("5090", "RTX5090"),
        ("AMD Instinct MI355X", "MI355X"),
        ("NVIDIA TITAN V", "TITAN-V"),
        ("titan rtx", "TITAN-RTX"),
        ("GeForce RTX 2060", "RTX2060"),
        ("Quadro P4000", "Quadro-P4000"),
    ],
)
def test_usual_names_are_found(text: str, name: str) -> None:
    assert find(text).name == name


@pytest.mark.skipif("AUTOPAR_DATA" not in os.environ, reason="AUTOPAR_DATA names no folder of published data")
def test_the_table_is_that_of_the_collected_data() -> None:
    collected = json.loads((Path(os.environ["AUTOPAR_DATA"]) / "device_specs.json").read_text())
    for name, stated in collected.items():
        if name.startswith("_"):
            continue
        gpu = find(name)
        assert gpu.name == name
        assert gpu.fp32_flops_per_s == pytest.approx(stated["fp32"] * 1e12)
        assert gpu.fp16_flops_per_s == pytest.approx(stated["fp16"] * 1e12)
        assert (gpu.bf16_flops_per_s or 0) == pytest.approx((stated["bf16"] or 0) * 1e12)
        assert gpu.memory_bytes == stated["mem_gb"] * 10**9
        assert gpu.memory_bytes_per_s == pytest.approx(stated["hbm_gbs"] * 1e9)
        assert gpu.nvlink_bytes_per_s == pytest.approx(stated["nvlink"] / 2 * 1e9)
        assert (gpu.collective_bytes_per_s or 0) == pytest.approx((stated["nccl_busbw"] or 0) * 1e9)
