"""A training script of one's own: it plans once, and trains under torchrun, batch by batch.

python train.py
torchrun --nproc-per-node 2 train.py
"""

import argparse
import os

import torch
from torch.utils.data import DataLoader

import autopar
from autopar.examples.mlp import dataset, loss, model, optimizer

BATCH = 64


def plan(path, ranks):
    batch = next(iter(DataLoader(dataset(), BATCH)))
    profile = autopar.profile(model(), batch, loss=loss, optimizer=optimizer, budget_s=1.0)
    found = autopar.plan(profile, gpus=ranks, min_stages=ranks, max_stages=ranks)
    found.save(path)
    print(found.explain())


def train(path, epochs, folder):
    torch.manual_seed(0)
    begun = model()
    # All ranks draw the same batches, and give each whole to the job, which takes the rank's own samples.
    loader = DataLoader(dataset(), BATCH, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))
    samples = next(iter(DataLoader(dataset(), 200)))
    with autopar.materialize(begun, autopar.Plan.load(path), loss=loss, optimizer=optimizer) as job:
        for epoch in range(epochs):
            for batch in loader:
                metrics = job.step(batch)
            evaluated = job.evaluate(samples)
            predicted = job.predict(samples)
            if job.rank == 0:
                right = (predicted["output"].argmax(1) == samples[1]).float().mean()
                print(f"epoch {epoch}: loss {metrics.loss:.6f}, evaluated {evaluated:.6f}, {right:.1%} right")
        job.save_weights(folder)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--plan", default="train.plan.json")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--save", default="trained")
    asked = options.parse_args()
    if "RANK" in os.environ:
        train(asked.plan, asked.epochs, asked.save)
    else:
        plan(asked.plan, asked.ranks)
