"""Gradients that are reduced together, also of parameters of which ranks have different parts."""

from __future__ import annotations

import threading

import torch

from autopar.formats.cuts import ParameterCut
from autopar.runtime.gradients.buckets import Bucket, SharedGradient, WholeBucket, fill_buckets
from autopar.runtime.messages.transport import Exchange, InProcessTransport
from autopar.runtime.stage.parameters import Team
from drawn_plans import chain, make
from teams import resized

CUT = ParameterCut(parameter="w", dim=0, parts=(((0, 1), (3, 4)), ((1, 3),)))


def test_gradients_are_views_of_one_buffer_with_marks_of_what_was_reached() -> None:
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


def test_layers_fill_buckets_from_the_last_to_the_first_and_types_have_their_own() -> None:
    layers = [[torch.nn.Parameter(torch.ones(2))], [], [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]]
    assert [[each.dtype for each in bucket.parameters] for bucket in fill_buckets(layers)] == [
        [torch.float64],
        [torch.float32],
    ]


def test_a_parameter_that_stages_cut_differently_is_reduced_as_a_whole() -> None:
    """The first stage's team has two parts of four rows, the second stage all of them, on two replicas."""
    plan = resized(make("gpipe", 1, [(4,), (2, 2)], [1, 1], chain(2)), [2, 1])
    stages = (plan.stages[0].model_copy(update={"cuts": (CUT,)}), plan.stages[1])
    plan = plan.model_copy(update={"stages": stages})
    gradients = [torch.randn(4, 2, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    whole = [gradients[0], gradients[0], gradients[1], gradients[2]]
    exchange, found, everyone = Exchange(), dict[int, torch.Tensor](), tuple(range(4))

    def work(rank: int) -> None:
        transport = InProcessTransport(exchange, rank)
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

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    total = sum(gradients)
    assert isinstance(total, torch.Tensor)
    for rank, rows in enumerate(([0, 3], [1, 2], [0, 1, 2, 3], [0, 1, 2, 3])):
        torch.testing.assert_close(found[rank], total[rows])
