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
# # Into your trainer
#
# You have a trainer already: torchtitan, Megatron-LM, DeepSpeed, accelerate, or a loop of your own. Here you make a
# plan, write it for each of these, and see what it costs that some cannot express all of it.

# %%
# %matplotlib inline
import copy

import matplotlib.pyplot as plt
import pandas as pd
import torch

import autopar

# %% [markdown]
# ## A plan
#
# Llama 3 8B again, on two nodes of eight H100s. [What if](what_if.ipynb) says where its profile is from, and why the
# search is told so much.

# %%
profile = autopar.Profile.load("data/llama.profile.json")
plan = autopar.plan(profile, "2x8xH100:400Gbps", batch=64, schedule="1f1b", micro_batches=8, gap=0.1)
plan.plot("placement")

# %%
plan.to_frame()[["layers", "replicas", "in_flight", "recomputed", "shard"]]

# %% [markdown]
# ## What each trainer can express
#
# `autopar.export` returns the files for a trainer. If the trainer cannot express the plan, it says why.

# %%
trainers = ["torch", "torchtitan", "megatron", "deepspeed", "accelerate", "torchrun"]


def reason(trainer):
    try:
        autopar.export(plan, trainer)
    except autopar.UsageError as error:
        return str(error).split(": ", 1)[1]
    return "as it is"


for trainer in trainers:
    print(f"{trainer}: {reason(trainer)}")

# %% [markdown]
# ## What it costs
#
# With `nearest=True` you get the nearest plan that the trainer can express. Its predicted step stands beside that of
# your plan.

# %% tags=["picture"]
exports = {trainer: autopar.export(plan, trainer, nearest=True) for trainer in trainers}
steps = pd.Series({trainer: each.plan.predicted.step_s for trainer, each in exports.items()})

axes = steps[::-1].plot.barh(figsize=(8, 3), xlabel="step, s", color="#0072b2")
axes.axvline(plan.predicted.step_s, color="#d55e00", linestyle="--", label="your plan")
axes.legend()
plt.show()

# %% [markdown]
# ## The files
#
# Each begins with the plan, and with what differs. This is the one for torchtitan:

# %%
print(exports["torchtitan"].text)

# %% [markdown]
# ## Your own loop
#
# Your loop stays yours: `job.step(batch)` takes the place of forward, backward and update. Here is a small model, first
# in a plain loop, then by a plan.

# %%
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))
inputs = torch.randn(2560, 32)
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
loader = torch.utils.data.DataLoader(data, batch_size=64)


def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def plain_loop(model):
    steps = optimizer(model.parameters())
    for batch in loader:
        value = loss(model(batch[0]), batch)
        value.backward()
        steps.step()
        steps.zero_grad()
        yield value.item()


plain = list(plain_loop(copy.deepcopy(model)))

# %%
small = autopar.plan(autopar.profile(model, next(iter(loader)), loss=loss, optimizer=optimizer, budget_s=1), gpus=1)
with autopar.materialize(model, small, loss=loss, optimizer=optimizer) as job:
    planned = [job.step(batch).loss for batch in loader]

axes = pd.DataFrame({"your loop": plain, "by the plan": planned}).plot(style=["-", "."], figsize=(8, 3))
axes.set(xlabel="step", ylabel="loss")
plt.show()

# %% [markdown]
# The losses are the same. This plan has one rank, so it runs in a notebook. A plan of several ranks runs in a script,
# by `torchrun`: seven lines, on the page for [Trainer and accelerate](../docs/howto/trainer.md). The losses stay those
# of your loop.
#
# Every format in full: [other trainers](../docs/reference/exports.md).
