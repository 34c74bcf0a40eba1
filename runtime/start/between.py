"""Evaluation of a run between its steps, on the ``evaluation_dataset()`` of the model file.

Every rank reads the samples whose tensors its stages take, batch by batch, as many as a mini-batch has. What reading
draws is seeded, and put back.
"""

from __future__ import annotations

import torch

from autopar.capture.layers.evaluation import EvaluationGraph
from autopar.capture.model.batch import named_tensors, seed_data
from autopar.capture.model.source import UserModel
from autopar.capture.model.state import preserve_generators
from autopar.ranks.context import RankContext
from autopar.runtime.job import Job
from autopar.runtime.start.agreement import Agreement
from autopar.runtime.start.evaluate import Evaluation
from autopar.runtime.start.workspace import evaluation_samples


class RunEvaluation:
    """Evaluates a run's model every so many steps; all ranks do so at once."""

    def __init__(self, context: RankContext, job: Job, graph: EvaluationGraph, model: UserModel, every: int) -> None:
        """Prepare.

        Raises:
            ModelError: the file has no dataset for it.
            UsageError: its last batch cannot be divided among replicas.
        """
        self._context, self._job, self._model, self._every = context, job, model, every
        self._agreement = Agreement(context, job.transport)
        self._evaluation = Evaluation(job, graph, job.transport, context.device, job.used_weights)
        with preserve_generators(context.device):
            self._data = evaluation_samples(model, job.plan.seed)
        samples, batch = model.sample_count(self._data), job.plan.batch
        self._batches = [range(first, min(first + batch, samples)) for first in range(0, samples, batch)]
        for rows in {len(each) for each in self._batches}:
            self._evaluation.prepare(rows)
        self.losses: dict[int, float] = {}
        """By the number of steps trained."""

    def is_due(self, done: int) -> bool:
        """Tell whether the model is evaluated behind so many steps."""
        return done % self._every == 0

    def evaluate(self, done: int) -> float:
        """Return the loss of all samples behind so many steps, on every rank."""
        parts = []
        for picked in self._batches:
            # Whoever watches over the rank sees that it goes on.
            self._context.note(max(done - 1, 0), len(self._job.actions) - 1)
            with preserve_generators(self._context.device):
                parts.append(self._evaluation.loss(done, len(picked), self._read(picked)))
        self.losses[done] = self._evaluation.mean(parts, self._agreement.sum)
        return self.losses[done]

    def _read(self, picked: range) -> dict[str, torch.Tensor]:
        if not self._evaluation.inputs:
            return {}
        samples = []
        for index in picked:
            seed_data(self._job.plan.seed, "evaluation", index)
            samples.append(self._model.sample(self._data, index))
        return named_tensors(self._model.collate(samples))
