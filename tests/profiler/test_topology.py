"""What ``nvidia-smi topo -m`` prints, as it was printed on real machines, in words."""

from __future__ import annotations

from autopar.profiler.probe import node_of_each, parse_topology, topology_notes

DGX = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tNV12\tNV12\tPXB\tSYS\t48-63,176-191\t3\t\tN/A
GPU1\tNV12\t X \tNV12\tNV12\tPXB\tSYS\t48-63,176-191\t3\t\tN/A
GPU2\tNV12\tNV12\t X \tNV12\tSYS\tPXB\t16-31,144-159\t1\t\tN/A
GPU3\tNV12\tNV12\tNV12\t X \tSYS\tPXB\t16-31,144-159\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tPXB\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""

WORKSTATION = """\
\tGPU0\tGPU1\tGPU2\tmlx5_0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPIX\tSYS\tPHB\t0-11\t0
GPU1\tPIX\t X \tNODE\tPHB\t0-11\t0
GPU2\tSYS\tNODE\t X \tSYS\t12-23\t1
mlx5_0\tPHB\tPHB\tSYS\t X
"""

SINGLE = """\
\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \t0-15\t0\t\tN/A
"""


def test_a_node_with_nvlinks_is_described() -> None:
    pairs = parse_topology(DGX)
    assert pairs["GPU0", "GPU3"] == "NV12"
    assert pairs["GPU2", "NIC1"] == "PXB"
    assert len(pairs) == 6 + 8 + 1
    assert topology_notes(DGX) == [
        "GPUs are connected by 12 NVLinks (NV12): 6 pairs",
        "GPUs and network cards are connected by several PCIe switches (PXB): 4 pairs, "
        "by the link between NUMA nodes (SYS): 4 pairs",
    ]


def test_a_workstation_without_nvlinks_is_described() -> None:
    assert topology_notes(WORKSTATION) == [
        "GPUs are connected by one PCIe switch (PIX): 1 pair, by the link between NUMA nodes (SYS): 1 pair, "
        "by PCIe bridges of one NUMA node (NODE): 1 pair",
        "GPUs and network cards are connected by the host's PCIe bridge (PHB): 2 pairs, "
        "by the link between NUMA nodes (SYS): 1 pair",
    ]


def test_nothing_is_said_of_a_single_gpu_or_of_other_text() -> None:
    assert topology_notes(SINGLE) == []
    assert topology_notes("") == []
    assert topology_notes("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") == []


def test_ranks_of_a_host_are_of_a_node_however_they_are_numbered() -> None:
    assert node_of_each([("a", 0), ("b", 0), ("a", 1), ("b", 1)]) == [0, 1, 0, 1]
