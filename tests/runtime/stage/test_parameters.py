"""The parameters and buffers of one rank, put in place by the model's own names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch
from torch import nn

from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.errors import FileError
from autopar.formats.plan import Shard
from autopar.runtime.stage.parameters import LocalParameters, OptimizerParameters, hold, sharded_parameter_names
from dictated import dictate
from paths import MODELS

CPU = torch.device("cpu")


def _captured(name: str = "normed") -> tuple[UserModel, LayerGraph]:
    user = load(str(MODELS / f"{name}.py"))
    return user, capture(user, user.build(0))


def _other_values(user: UserModel) -> dict[str, torch.Tensor]:
    module = user.build(1)
    return {name: value.detach() for name, value in (*module.named_parameters(), *module.named_buffers())}


def test_ranks_hold_what_their_layers_have_with_the_values_that_are_read() -> None:
    user, graph = _captured()
    plan = dictate(graph, user, (1, 1), 2, 4)
    values = _other_values(user)
    names: set[str] = set()
    for index, stage in enumerate(plan.stages):
        layers = [graph.layer(name) for name in stage.layers]
        asked: list[str] = []

        def read(wanted: Iterable[str], asked: list[str] = asked) -> Mapping[str, torch.Tensor]:
            asked += wanted
            return {name: values[name] for name in wanted}

        local = hold(plan, {index: layers}, read, CPU)
        assert set(asked) == local.state().keys()
        for layer in layers:
            for attribute, name in layer.parameters.items():
                assert layer.parameter(attribute) is local.parameters[name]
            for attribute, name in layer.buffers.items():
                assert layer.module.get_buffer(attribute) is local.buffers[name]
        assert all(torch.equal(value, values[name]) for name, value in local.state().items())
        names |= set(asked)
    assert names == values.keys()
    with pytest.raises(FileError, match=rf"the initial weights lack .* and {len(asked) - 1} more; check `weights`"):
        hold(plan, {index: layers}, lambda wanted: {}, CPU)


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_what_has_rows_and_belongs_to_one_stage_is_divided(shard: Shard) -> None:
    user, graph = _captured("words")
    plan = dictate(graph, user, (2, 2), 2, 4, shard=shard)
    for index, stage in enumerate(plan.stages):
        layers = [graph.layer(name) for name in stage.layers]
        layers[0].module.register_parameter("scalar", nn.Parameter(torch.tensor(1.0)))
        layers[0].parameters["scalar"] = "scalar"  # type: ignore[index]
        every = {name for layer in layers for name in layer.parameters.values()} - {"scalar"}
        found = sharded_parameter_names(plan, index, layers)
        assert found == (set() if shard == "none" else every - {tied.parameter for tied in plan.tied})


def test_nothing_is_held_of_parameters_while_they_are_divided_and_their_order_stays() -> None:
    user, graph = _captured()
    layers = list(graph.layers)
    plan = dictate(graph, user, (1,), 2, 4)
    local: LocalParameters = hold(plan, {0: layers}, lambda wanted: _other_values(user), CPU)
    order = list(local.parameters)
    divided = set(order[::2])
    with local.dividing(divided, layers) as whole:
        assert set(local.parameters) == set(order) - divided
        assert whole == set(local.parameters.values())
        for layer in layers:
            for attribute, name in layer.parameters.items():
                if name in divided:
                    path, _, last = attribute.rpartition(".")
                    setattr(layer.module.get_submodule(path), last, nn.Parameter(torch.zeros(1)))
    assert list(local.parameters) == order
    assert {name for name, value in local.parameters.items() if value.shape == (1,) and not value.any()} >= divided
    given = OptimizerParameters(local.trainable_parameters(), None)
    assert given.optimizer_parameters == given.trainable_parameters
