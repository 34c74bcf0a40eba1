# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Inspecting a plan
#
# A profile says what every layer of a model costs, a cluster what the devices and their links can do. From the two,
# autopar plans a training step without touching the model. Here the profile is that of `examples/gpt.py`, measured
# with `autopar profile`.

# %%
# %matplotlib inline
from itertools import pairwise
from pathlib import Path

import pandas as pd

import autopar
from autopar.formats.cluster import Cluster
from autopar.planner import PlanOptions, plan, simulate
from autopar.report import pictures

DATA = Path("data")
profile = autopar.Profile.load(DATA / "gpt.profile.json")
cluster = Cluster.load(DATA / "gpt.cluster.json")

# %% [markdown]
# ## The profile
#
# Times and bytes of each layer at each measured micro-batch size. Identical layers are measured once: `measured_as`
# names the layer whose measurement it is.

# %%
layers = profile.to_frame()
layers.xs(4, level="micro_batch")

# %% [markdown]
# What one sample costs depends on the micro-batch: a small one leaves the device waiting for instructions, a large one
# outgrows its caches.

# %%
whole = layers.groupby("micro_batch")[["forward_s", "backward_s", "saved_bytes"]].sum()
(whole.assign(step_s=whole.forward_s + whole.backward_s).div(whole.index, axis=0) * 1e3).rename(
    columns={"forward_s": "forward (ms per sample)", "backward_s": "backward (ms per sample)"}
)[["forward (ms per sample)", "backward (ms per sample)"]]

# %% [markdown]
# ## A plan for two devices
#
# The planner searches stage boundaries, replicas, micro-batch counts and schedules, and stops when no plan can be
# faster by more than the asked gap: `lower_bound_s` is what no searched plan can beat.

# %%
two = plan(profile, cluster, PlanOptions(gpus=2))
stages = pd.DataFrame([stage.model_dump() for stage in two.stages])
stages.assign(peak_bytes=two.predicted.peak_bytes)[["layers", "devices", "shares", "warmup", "peak_bytes"]]

# %%
{
    "schedule": two.schedule,
    "micro-batches": f"{two.micro_batches} of {two.micro_batch_size}",
    "step": f"{two.predicted.step_s:.3f} s",
    "lower bound": f"{two.predicted.lower_bound_s:.3f} s",
    "bubble": f"{two.predicted.bubble:.1%}",
}

# %% [markdown]
# ## Alternatives
#
# What else was considered, and why it lost. The text in `stages` is what `autopar plan --stages` takes.

# %%
others = pd.DataFrame([alternative.model_dump() for alternative in two.alternatives]).sort_values("step_s")
others[["name", "step_s", "stages", "micro_batches", "schedule", "infeasible"]]

# %% [markdown]
# ## The step, action by action

# %%
pictures.draw_timeline(simulate(two, profile, cluster))

# %% [markdown]
# ## A pipeline, dictated
#
# Four stages, cut where the layers' count says, are priced in the same way. The memory of each stage holds its
# parameters, their gradients and optimizer state, and the activations of the micro-batches in flight; here each device
# is given 256 MiB.

# %%
names = [layer.name for layer in profile.layers]
cuts = [index * len(names) // 4 for index in range(5)]
dictated = ",".join(f"{first}-{stop - 1}:1" for first, stop in pairwise(cuts))
limit = 256 * 2**20
four = plan(profile, cluster, PlanOptions(gpus=4, stages=dictated, memory_bytes=limit))
pictures.draw_timeline(simulate(four, profile, cluster))

# %%
peaks = pd.DataFrame({"device memory": limit, "predicted peak": four.predicted.peak_bytes}) / 2**20
axes = peaks.plot.barh(xlabel="MiB", ylabel="stage")
