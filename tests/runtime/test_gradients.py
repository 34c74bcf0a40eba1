"""Gradients in buckets, of replicas, and of stages that share parameters, against plain sums over the ranks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import nn

from autopar.capture.layers.export import capture_module
from autopar.formats.cuts import ParameterCut
from autopar.formats.profile import Writes
from autopar.runtime.gradients import Bucket, Reducer, SharedGradient, WholeBucket, fill_buckets
from autopar.runtime.messages.transport import Exchange, InProcessTransport, Transport
from autopar.runtime.stage.parameters import LocalParameters, Team, replicate_buffers
from drawn_plans import chain, make, resized
from threads import in_ranks


def _model() -> nn.ModuleList:
    """Three layers, of which the last one uses the first one's weight again, and a bias that is not always used."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()
    layers[2].weight = layers[0].weight
    return layers


def _loss(layers: nn.ModuleList, x: torch.Tensor, last_bias: bool) -> torch.Tensor:
    x = layers[1](torch.tanh(layers[0](x)))
    return torch.nn.functional.linear(x, layers[2].weight, layers[2].bias if last_bias else None).square().sum()


@pytest.mark.parametrize("reaching_ranks", [(), (1,), (0, 1, 2)])
def test_replicas_have_the_sum_and_all_or_none_the_gradient_that_some_reached(reaching_ranks: tuple[int, ...]) -> None:
    inputs = torch.rand(3, 2, 5, 4, dtype=torch.float64)
    whole = _model()
    for rank in range(3):
        for x in inputs[rank]:
            _loss(whole, x, rank in reaching_ranks).backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    squares = [torch.zeros(())] * 3
    models = [_model() for _ in range(3)]

    def act(rank: int, transport: Transport) -> None:
        layers = models[rank]
        stages = {0: [list(layer.parameters()) for layer in layers]}
        reducer = Reducer(stages, {}, (0, 1, 2), {}, transport, lambda: "now", rank)
        for step in range(2):
            reducer.begin(step)
            for number, x in enumerate(inputs[rank]):
                if number == 1:
                    reducer.begin_last_backward(0)
                _loss(layers, x, rank in reaching_ranks).backward()
            assert reducer.finish(0) == "now"
            reducer.scale(0.5)
            reducer.release_untouched()
        squares[rank] = sum((each.square().sum() for each in reducer.owned_gradients()), torch.zeros(()))

    in_ranks(3, act)
    for model in models:
        for name, parameter in model.named_parameters():
            if expected[name] is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, expected[name] / 2)
    full = sum(each.square().sum() for each in expected.values() if each is not None)
    # Every element is of one rank alone.
    torch.testing.assert_close(sum(squares), full / 4)


def test_a_parameter_of_several_stages_has_the_sum_over_all_that_hold_it() -> None:
    models = [_model() for _ in range(2)]
    x = torch.rand(5, 4, dtype=torch.float64)
    whole = _model()
    (whole[0](x).square().sum() + whole[2](x).sum()).backward()
    seen: dict[int, list[torch.Tensor]] = {}

    def act(rank: int, transport: Transport) -> None:
        layer = models[rank][2 * rank]
        shared = {7: SharedGradient(layer.weight, (0, 1), (0,))}
        reducer = Reducer({rank: [list(layer.parameters())]}, {}, (rank,), shared, transport, lambda: None, rank)
        reducer.begin(0)
        (layer(x).square().sum() if rank == 0 else layer(x).sum()).backward()
        assert reducer.finish(rank) is None
        reducer.finish_shared(7)
        reducer.release_untouched()
        seen[rank] = reducer.owned_gradients()

    in_ranks(2, act)
    for rank, model in enumerate(models):
        torch.testing.assert_close(model[2 * rank].weight.grad, whole[0].weight.grad)
        torch.testing.assert_close(model[2 * rank].bias.grad, whole[2 * rank].bias.grad)
    assert [len(seen[rank]) for rank in (0, 1)] == [2, 1]


@pytest.mark.parametrize("how", ["first", "average"])
def test_written_buffers_are_the_first_replicas_or_the_mean(how: Literal["first", "average"]) -> None:
    batch = (torch.ones(2, 3), torch.ones(2, 1))
    (layer,) = capture_module(nn.Sequential(nn.Linear(3, 1)), batch, lambda output, _: output.mean()).layers
    writing = replace(layer, writes=Writes(buffers=("mean", "count", "flag")))
    states: list[Mapping[str, torch.Tensor]] = [
        {
            "mean": torch.full((2,), 3.0 * rank + 1),
            "count": torch.tensor(rank + 5),
            "flag": torch.tensor([rank == 0, rank == 1]),
            "unwritten": torch.tensor(float(rank)),
        }
        for rank in range(3)
    ]

    def act(rank: int, transport: Transport) -> None:
        local = LocalParameters({}, states[rank])
        replicate_buffers([writing], local, how, transport, (0, 1, 2), rank)()

    in_ranks(3, act)
    for rank, state in enumerate(states):
        assert state["mean"].tolist() == [1.0 if how == "first" else 4.0] * 2
        assert (state["count"].item(), state["flag"].tolist(), state["unwritten"].item()) == (5, [True, False], rank)


CUT = ParameterCut(parameter="w", dim=0, parts=(((0, 1), (3, 4)), ((1, 3),)))


def test_gradients_are_views_of_one_buffer_of_each_type_with_marks_of_what_was_reached() -> None:
    first, second = (torch.nn.Parameter(torch.ones(size)) for size in (2, 3))
    bucket = Bucket([first, second])
    bucket.attach()
    assert first.grad is not None
    first.grad.add_(2.0)
    bucket.mark({id(first)})
    assert bucket.buffer.tolist() == [2.0, 2.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    bucket.release_untouched()
    assert second.grad is None
    assert first.grad.tolist() == [2.0, 2.0]
    # Layers fill buckets from the last to the first.
    layers = [[torch.nn.Parameter(torch.ones(2))], [], [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]]
    types = [[each.dtype for each in bucket.parameters] for bucket in fill_buckets(layers)]
    assert types == [[torch.float64], [torch.float32]]


def test_a_parameter_that_stages_cut_differently_is_reduced_as_a_whole() -> None:
    """The first stage's team has two parts of four rows, the second stage all of them, on two replicas."""
    plan = resized(make("gpipe", 1, [(4,), (2, 2)], [1, 1], chain(2)), [2, 1])
    stages = (plan.stages[0].model_copy(update={"cuts": (CUT,)}), plan.stages[1])
    plan = plan.model_copy(update={"stages": stages})
    gradients = [torch.randn(4, 2, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    whole = [gradients[0], gradients[0], gradients[1], gradients[2]]
    found, everyone = dict[int, torch.Tensor](), tuple(range(4))

    def work(rank: int, transport: Transport) -> None:
        team = Team(plan, rank, transport)
        parameter = torch.nn.Parameter(team.take("w", torch.zeros(4, 2)).clone())
        bucket = SharedGradient(parameter, everyone, (0, 1), "w", team).bucket()
        assert isinstance(bucket, WholeBucket)
        bucket.attach()
        assert parameter.grad is not None
        parameter.grad += team.take("w", whole[rank])
        bucket.mark({id(parameter)})
        bucket.collect()
        transport.all_reduce(bucket.buffer, everyone).wait()
        bucket.spread()
        bucket.release_untouched()
        (found[rank],) = bucket.gradients

    in_ranks(4, work)
    total = sum(gradients)
    assert isinstance(total, torch.Tensor)
    for rank, rows in enumerate(([0, 3], [1, 2], [0, 1, 2, 3], [0, 1, 2, 3])):
        torch.testing.assert_close(found[rank], total[rows])


@pytest.mark.parametrize(("rank", "counts"), [(0, True), (1, True), (2, False)])
def test_each_rank_of_the_first_team_answers_for_what_stages_share(rank: int, counts: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    shared = {0: SharedGradient(parameter, (0, 1, 2), (0, 1))}
    transport = InProcessTransport(Exchange(), rank)
    reducer = Reducer({0: [[parameter]]}, {}, (rank,), shared, transport, lambda: None, rank)
    reducer.begin(0)
    assert bool(reducer.owned_gradients()) == counts
