"""Estimates for GPUs that are not there, against counting by hand and against runs on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from autopar.capture import load
from autopar.errors import CaptureError, UsageError
from autopar.hardware.clusters import cluster_named
from autopar.hardware.gpus import find
from autopar.planner import plan
from autopar.profiler.estimate import RESERVED_BYTES, estimate, layer_seconds, workload
from autopar.profiler.optimizer import moved_per_number
from autopar.profiler.roofline import Constants, default_constants
from autopar.profiler.subject import ProfileOptions, Subject, prepare
from paths import EXAMPLES

A100 = find("A100")


@pytest.fixture(scope="module")
def mlp() -> Subject:
    return prepare(load(str(EXAMPLES / "mlp.py")), ProfileOptions(batch=8))


@pytest.fixture(scope="module")
def gpt() -> Subject:
    return prepare(load(str(EXAMPLES / "gpt.py")), ProfileOptions(batch=8))


def test_a_single_sample_without_a_variance_is_left_to_the_larger_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n"
        "def model():\n    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))\n\n"
        "def dataset():\n    return [(torch.ones(8), torch.ones(1))] * 8\n\n"
        "def loss(output, batch):\n    return (output - batch[1]).square().mean()\n"
    )
    subject = prepare(load(str(path)), ProfileOptions(batch=8))
    assert workload(subject, A100, 8).sizes == (2, 4, 8)
    with pytest.raises(CaptureError, match="cannot be estimated"):
        workload(subject, A100, 8, sizes=(1,))


def test_every_number_of_an_estimated_profile_says_so_and_a_plan_can_be_made_of_it(gpt: Subject) -> None:
    options = ProfileOptions(batch=8, precision="bf16")
    profile = estimate(replace(gpt, precision="bf16"), find("H100"), options)
    assert {cost.provenance for layer in profile.layers for cost in layer.costs} == {"estimated"}
    assert profile.device.name == "H100-SXM"
    assert profile.device.reserved_bytes == RESERVED_BYTES
    assert any("estimated for H100-SXM" in note for note in profile.notes)
    block = next(layer for layer in profile.layers if layer.name == "blocks.1")
    assert block.measured_as == "blocks.0"
    assert block.optimizer_bytes >= 2 * block.trainable_bytes
    assert all(0 < cost.backward_input_s < cost.backward_s for cost in block.costs if cost.backward_input_s)
    largest = block.costs[-1]
    assert largest.forward_s >= (largest.forward_launch_s or 0.0) > 0
    found = plan(profile, cluster_named("4xH100"))
    assert found.predicted.step_s > 0


def test_storages_that_cross_boundaries_carry_their_tensors_names(mlp: Subject) -> None:
    profile = estimate(mlp, A100, ProfileOptions(batch=8))
    names = {tensor.name for tensor in profile.tensors}
    stored = {saved.storage for layer in profile.layers for cost in layer.costs for saved in cost.saved}
    own = {name for name in stored if "#" in name}
    assert stored - own <= names
    assert all(name.split("#")[0] in {layer.name for layer in profile.layers} for name in own)


def test_a_precision_that_the_gpu_lacks_is_refused(mlp: Subject) -> None:
    with pytest.raises(UsageError, match="has no bfloat16"):
        estimate(replace(mlp, precision="bf16"), find("V100"), ProfileOptions(batch=8))
    with pytest.raises(UsageError, match="are float64, and no rate of A100-SXM-80G in float64 is known"):
        estimate(replace(mlp, precision="fp64"), A100, ProfileOptions(batch=8))


def test_better_constants_shorten_every_layer(mlp: Subject) -> None:
    load_ = workload(mlp, A100, 8)
    usual, faster = Constants(), Constants(kernel_s=1e-6, forward_launch_s=1e-6, backward_launch_s=1e-6)
    assert np.all(layer_seconds(load_, faster).forward_s < layer_seconds(load_, usual).forward_s)
    assert default_constants(find("H100")).matmul_share < default_constants(A100).matmul_share


def test_what_an_optimizer_moves_is_counted_over_its_kernels(mlp: Subject) -> None:
    # SGD with momentum: momentum times 0.9, plus the gradient, and the parameter minus it.
    trained = [("w", nn.Parameter(torch.ones(100, 10)))]
    assert moved_per_number(mlp.user, trained) == pytest.approx(4 * (2 + 3 + 3))
    assert moved_per_number(mlp.user, [("b", nn.Parameter(torch.ones(3), requires_grad=False))]) == 0.0
