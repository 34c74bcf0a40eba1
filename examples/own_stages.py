"""Stages of your own: two modules, trained as a pipeline by the executor, in two threads. No profile, no plan file.

python examples/own_stages.py
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from autopar.capture import LayerGraph, capture_module
from autopar.capture.model.batch import given_model
from autopar.formats.plan import ModelSource, Plan, Prediction, Stage
from autopar.runtime.job import Job
from autopar.runtime.messages.transport import Exchange, InProcessTransport
from autopar.runtime.stage.layers import crossings
from autopar.schedules.expand import expand

BATCH = torch.randn(24, 8, dtype=torch.float64), torch.randn(24, 1, dtype=torch.float64)
STEPS, LOSS = 5, nn.MSELoss()


def plan_of(graph: LayerGraph) -> Plan:
    """Return the plan of a 1F1B pipeline of one stage for each layer, and one device for each stage."""
    place, count = {layer.name: at for at, layer in enumerate(graph.layers)}, len(graph.layers)
    stages = [Stage(layers=(name,), devices=(at,), shares=(6,), warmup=count - at) for name, at in place.items()]
    unknown = Prediction(step_s=0, lower_bound_s=0, bubble=0, peak_bytes=(0,) * count)
    fields = {"tensors": crossings(graph.tensors, place), "predicted": unknown, "schedule": "1f1b", "precision": "fp64"}
    sizes = {"batch": 24, "micro_batches": 4, "micro_batch_size": 6}
    return Plan(model=ModelSource(source="own_stages.py", sha256="0" * 64), stages=tuple(stages), **sizes, **fields)


def train(model: nn.Sequential) -> list[float]:
    """Train a model whose elements are the stages, each in a thread; return the losses."""
    functions = {"loss": lambda output, batch: LOSS(output, batch[1])}
    graph, user = capture_module(model, BATCH, functions["loss"], list), given_model(model, BATCH, **functions)
    plan, state, exchange = plan_of(graph), model.state_dict(), Exchange()

    def run(rank: int) -> list[float]:
        place = InProcessTransport(exchange, rank), torch.device("cpu"), lambda step, position: None
        job = Job(plan, expand(plan), rank, graph, user, lambda names: {name: state[name] for name in names}, *place)
        return [job.step(step).loss for step in range(STEPS)]

    with ThreadPoolExecutor() as threads:
        return [sum(parts) for parts in zip(*threads.map(run, range(len(plan.stages))), strict=True)]


if __name__ == "__main__":
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 1)).double()
    plain = copy.deepcopy(model)
    losses, optimizer = torch.tensor(train(model), dtype=torch.float64), torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for found in losses:
        optimizer.zero_grad()
        expected = LOSS(plain(BATCH[0]), BATCH[1])
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    print("losses:", *losses.tolist())
