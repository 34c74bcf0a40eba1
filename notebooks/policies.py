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
# # Weight policies: train without a flush
#
# At the end of each step, a pipeline drains, and at the start of the next one it fills again: a *flush*. Meanwhile
# devices wait. You can leave the flush out. Then no device waits, but a micro-batch may see older weights. Here you see
# how old they are, what this does to the loss, and what it saves.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import pandas as pd

import autopar

# %% [markdown]
# ## With and without a flush
#
# The model is a small GPT that was measured on a CPU, in four stages with four micro-batches a step. First with a
# flush, by the policy `sync`:

# %%
profile = autopar.Profile.load("data/gpt.profile.json")
cluster = autopar.Cluster.load("data/gpt.cluster.json")
common = {"gpus": 4, "min_stages": 4, "max_stages": 4, "micro_batches": 4}
sync = autopar.plan(profile, cluster, schedule="1f1b", **common)
sync.plot("timeline")

# %% [markdown]
# And without, by the policy `stash` of PipeDream. You see several steps, one behind the other, from fill to drain. In
# the middle nobody waits.

# %%
stash = autopar.plan(profile, cluster, policy="stash", **common)
stash.plot("timeline")

# %% [markdown]
# ## How old are the weights?
#
# Each update makes a new version of the weights. When a forward comes, the updates of the micro-batches that are still
# in flight have not been made. `in_flight` is in the table of the plan, and is written K below; T is the number of
# micro-batches of a step.

# %%
stages = stash.to_frame()
stages[["first_layer", "last_layer", "in_flight", "peak_bytes"]]

# %% [markdown]
# From this follows which version micro-batch *m* sees:
#
# - `sync`: that of its own step, *m // T*.
# - `stash`: the newest when it comes, *(m - K + 1) // T*, and the same for its backward.
# - `2bw`: on all stages the one before the newest, *m // T - 1*.
#
# The distance to `sync` is the staleness, in updates.

# %%
T = stash.micro_batches
versions = {
    "sync": lambda m, depth: m // T,
    "stash": lambda m, depth: max(0, (m - depth + 1) // T),
    "2bw": lambda m, depth: max(0, m // T - 1),
}
figure, panels = plt.subplots(1, 3, figsize=(11, 3), sharey=True, layout="constrained")
for axes, (name, version) in zip(panels, versions.items(), strict=True):
    for stage, depth in stages.in_flight.items():
        seen = [version(m, depth) for m in range(16)]
        axes.step(range(16), [each + 0.06 * stage for each in seen], where="mid", label=f"stage {stage}")
    axes.set(title=name, xlabel="micro-batch", xticks=range(0, 16, T), yticks=range(4))
panels[0].set_ylabel("version of the weights")
panels[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# Under `stash`, early stages see older weights than late ones. Under `2bw`, all see the same, always one update late.
#
# ## What it does to the loss
#
# These curves were recorded: a GPT with AdamW and a ResNet with SGD, on four stages, the median of five seeds.
# `data/loss_curves.csv` says which command made them.

# %% tags=["picture"]
curves = pd.read_csv("data/loss_curves.csv", comment="#")
colours = dict(zip(["stash", "2bw", "predict", "pipemare", "vertical-sync"], plt.cm.tab10.colors, strict=False))
colours["sync"] = "black"

figure, panels = plt.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
for axes, (model, own) in zip(panels, curves.query("micro_batches == 4").groupby("model"), strict=True):
    for policy, curve in own.groupby("policy"):
        axes.plot(curve.mini_batch, curve.loss, color=colours[policy], label=policy)
    axes.set(title=model, xlabel="mini-batch", ylabel="loss")
figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
plt.show()

# %% [markdown]
# The ResNet soon catches up. The GPT learns more slowly under all policies. With one micro-batch a step, weights are
# older still. This is how far the last fifty mini-batches are above `sync`:

# %%
last = curves[curves.mini_batch > 450].groupby(["model", "micro_batches", "policy"]).loss.mean().unstack()
above = last.sub(last.loc[(slice(None), 4), "sync"].droplevel("micro_batches"), axis="index", level="model")
shown = above.drop(columns="sync").rename(lambda count: f"{count} a step", level="micro_batches")
axes = shown.plot.bar(figsize=(9, 3.2), rot=0, color=colours, xlabel="", ylabel="loss above sync")
axes.legend(ncols=5, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
plt.show()

# %%
above.round(3)

# %% [markdown]
# ## What it saves
#
# The slower the network, the longer the wait at a flush. Here is the time of a mini-batch on slower and slower links.

# %%
links = ["10GB/s", "1GB/s", "300MB/s", "100MB/s", "30MB/s"]
seconds = pd.DataFrame(
    {
        policy: {
            each: autopar.plan(profile, cluster, bytes_per_s=each, policy=policy, **common).predicted.step_s
            for each in links
        }
        for policy in ("sync", "stash")
    }
)
axes = seconds.plot.bar(figsize=(8, 3), rot=0, xlabel="links", ylabel="s per mini-batch")
plt.show()

# %% [markdown]
# ## Before you rely on it
#
# Train your own model both ways. `autopar plan --policy stash` and `autopar run` do it, and `autopar verify` holds the
# training against the rule above. All policies and their sources: [weight policies](../docs/howto/weight_policies.md).
