"""The parameters and buffers of one rank, put in place by the model's own names, and its team's parts of them."""

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.capture.graph import LayerGraph, TensorSpec
from autopar.capture.layers.export import capture
from autopar.capture.model.source import UserModel, load
from autopar.errors import FileError
from autopar.formats.plan import Plan
from autopar.ownership import Shard
from autopar.runtime.messages.transport import Exchange, InProcessTransport
from autopar.runtime.stage.parameters import LocalParameters, OptimizerParameters, Team, hold, sharded_parameter_names
from dictated import dictate
from drawn_plans import DIVISIONS, PARTS, make, team_plan
from paths import MODELS
from threads import in_ranks

CPU = torch.device("cpu")


def _captured(name: str = "batch_normed") -> tuple[UserModel, LayerGraph]:
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


def test_parts_sum_gather_and_hold_nothing_while_they_are_divided() -> None:
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
    plan = team_plan([{0}, {1}, {2}])
    mine = [torch.full((2, 3), float(part)) for part in range(PARTS)]
    everyone = (0, 1, 2)
    assert all(each.eq(3).all() for each in together(plan, lambda team: team.sum(mine[team.part], everyone)))
    gathered = together(plan, lambda team: team.gather(mine[team.part], 1, everyone))
    assert all(torch.equal(each, torch.cat(mine, 1)) for each in gathered)
    scattered = together(plan, lambda team: team.reduce_scatter(torch.arange(6.0).view(2, 3), 1, everyone))
    assert [each.tolist() for each in scattered] == [[[3.0 * at], [3.0 * (at + 3)]] for at in range(3)]
    # Of a tensor that only its reader has in slices, the slice is what a rank has.
    stages = [SimpleNamespace(sequence_dims=dims) for dims in ({}, {"t": 1})]
    team: Any = SimpleNamespace(_plan=SimpleNamespace(stages=stages), ranks=(0, 1))
    spec = TensorSpec("t", None, (), (6, 4), 0, torch.float32, gradient=True)
    assert [Team.local_spec(team, spec, each).sizes for each in ([0], [0, 1])] == [(6, 4), (3, 4)]


def together(plan: Plan, act: Callable[[Team], Any]) -> list[Any]:
    """Have all ranks of a team do something at once; return what each gives."""
    found = dict[int, Any]()
    in_ranks(PARTS, lambda rank, transport: found.update({rank: act(Team(plan, rank, transport))}))
    return [found[rank] for rank in range(PARTS)]


@settings(max_examples=40, deadline=None)
@given(DIVISIONS, st.integers(0, 1), st.sampled_from([torch.float64, torch.bool, torch.int32, torch.complex64]))
def test_what_ranks_take_of_a_tensor_joins_to_it_bit_for_bit(
    holders: list[set[int]], dim: int, dtype: torch.dtype
) -> None:
    holders = [*holders, set(range(PARTS))]
    shape = (len(holders), 2) if dim == 0 else (2, len(holders))
    whole = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    if dtype is torch.float64:
        whole[0, 0], whole[-1, -1] = -0.0, float("nan")
    for found in together(team_plan(holders, dim), lambda team: team.whole("w", team.take("w", whole))):
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))


@settings(max_examples=40, deadline=None)
@given(DIVISIONS)
def test_every_element_is_answered_for_once(holders: list[set[int]]) -> None:
    holders = [*holders, set(range(PARTS))]
    plan, whole = team_plan(holders), torch.arange(len(holders), dtype=torch.float64)[:, None]
    found = together(plan, lambda team: team.owned_views("w", team.take("w", whole), team.take("w", whole)))
    rows = [float(value) for views in found for view in views for value in view.flatten()]
    assert sorted(rows) == list(range(len(holders)))
    others = together(plan, lambda team: team.owned_views("b", whole, whole))
    assert [len(views) for views in others] == [1, 0, 0]


@pytest.mark.parametrize("dim", [0, 1])
def test_shapes_of_parts_are_those_of_the_whole_but_for_the_cut(dim: int) -> None:
    alone = Team(make("gpipe", 1, [(4,)], [1], ()), 0, InProcessTransport(Exchange(), 0))
    whole = torch.ones(3)
    assert alone.take("w", whole) is alone.whole("w", whole) is whole
    assert alone.shape("w", (3,)) == (3,)
    plan = team_plan([{0}, {0}, {1}, {2}], dim)
    whole = torch.ones((4, 5) if dim == 0 else (5, 4))
    for part, size in enumerate((2, 1, 1)):
        team = Team(plan, part, InProcessTransport(Exchange(), part))
        own = team.take("w", whole)
        assert own.shape[dim] == size
        assert team.shape("w", own.shape) == tuple(whole.shape)
