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
# # Your first plan
#
# You have a PyTorch model and several devices. Here you measure the model, ask for a plan, and read why it is this one
# and no other. This takes a minute. You need no GPU.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import pandas as pd
import torch

import autopar

# %% [markdown]
# ## Your model
#
# Any PyTorch model will do that `torch.export` captures. This one has six blocks between an embedding and a head. A
# batch is what your data loader gives: here, inputs and labels. The loss is a function of the model's output and the
# batch. The optimizer is a function of parameters.


# %%
class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.embed = torch.nn.Linear(64, width)
        self.blocks = torch.nn.ModuleList(Block(width) for block in range(6))
        self.head = torch.nn.Linear(width, 10)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


torch.manual_seed(0)
model = Net()
inputs = torch.randn(256, 64)
batch = inputs, inputs[:, :10].argmax(1)

# %% [markdown]
# ## What is measured
#
# `autopar.profile` captures the model, divides it into layers, and times each one. Your own model stays as it is.

# %%
profile = autopar.profile(model, batch, loss=loss, optimizer=optimizer, budget_s=2)
profile.plot()

# %% [markdown]
# The panels show, layer by layer: how long it computes; what it keeps until its backward; its parameters; and what the
# next device must be sent if you cut behind it. Compare the last two. The parameters are megabytes. A cut sends
# kilobytes. Remember this: it decides the plans below.
#
# The numbers are a table, too, with one row for every layer and size of micro-batch.

# %%
layers = profile.to_frame().xs(256, level="micro_batch")
layers[["forward_s", "backward_s", "saved_bytes", "parameters_bytes", "crossing_bytes_per_sample"]]

# %% [markdown]
# ## A plan
#
# Now plan for four devices like this one. A plan says which layers run on which device, and in which order. Nothing is
# trained yet. You see the devices with their stages, and below them one training step.

# %%
fast = autopar.plan(profile, gpus=4)
fast.plot("placement")

# %% [markdown]
# A *stage* is a piece of the model. If you see one, all devices have the whole model, and each takes a part of the
# samples. That is *data parallelism*. At the end of the step, they add up their gradients: the strip called `reduce`.
#
# ## Another network, another plan
#
# Let the devices be connected by a slow network of 100 Mbit/s. `1f1b` is the classic order of forwards and backwards;
# [another notebook](schedules.ipynb) shows all seven.

# %% tags=["picture"]
slow = autopar.plan(profile, gpus=4, bytes_per_s="100Mbps", schedule="1f1b")
slow.plot("timeline")

# %% [markdown]
# ## Why this plan
#
# Now there are several stages, and each device has some of the layers. That is a *pipeline*. The batch is cut into
# micro-batches, which flow through it one behind the other.
#
# Data parallelism adds up gradients, which are as large as the parameters. On a slow network this takes long. A
# pipeline sends only what crosses the cuts, which is far less; but its devices wait while it fills and drains. The
# planner tries both, and what lies between. A plan keeps what else was considered:


# %%
def alternatives(plan):
    rows = [("this plan", plan.predicted.step_s), *((each.name, each.step_s) for each in plan.alternatives)]
    return pd.DataFrame(rows, columns=["plan", "step_s"]).dropna().set_index("plan")["step_s"].rename("predicted") * 1e3


figure, both = plt.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
for axes, title, plan in zip(both, ("fast links", "100 Mbit/s"), (fast, slow), strict=True):
    alternatives(plan)[::-1].plot.barh(
        ax=axes, title=title, xlabel="step, ms", ylabel="", color="#0072b2", legend=False
    )
    axes.axvline(plan.predicted.lower_bound_s * 1e3, color="#d55e00", linestyle="--", label="no plan takes less")
figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
plt.show()

# %% [markdown]
# The dashed line is a lower bound: no plan that the planner searches can be faster. So you know when to stop looking.
#
# `print(plan)` has all of this as text. Read `what binds`: it names what you would have to make faster.

# %%
print(slow)

# %% [markdown]
# ## Where to go from here
#
# - Keep a plan with `slow.save("plan.json")`. `autopar run` trains by it, and compares the step with the prediction.
# - Ask what other machines would change: [what if](what_if.ipynb).
# - Read the words of a plan: [concepts](../docs/concepts.md).
