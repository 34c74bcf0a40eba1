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
# # Seven schedules
#
# A schedule says in which order a device does its forwards and backwards. autopar has seven. Here you see all of them
# run the same model, what each leaves idle, and what each keeps in memory.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import pandas as pd

import autopar

# %% [markdown]
# ## One model, seven plans
#
# The model is Llama 3 8B, estimated for an H100 ([what if](what_if.ipynb) says how), on four GPUs that are as fast and
# have more memory. A step has eight micro-batches of one sample. So that nothing differs but the schedule, the cuts are
# dictated: four pieces that take about equally long, or eight where a GPU has two of them.

# %%
profile = autopar.Profile.load("data/llama.profile.json")
schedules = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]
four = "0-9:1,10-18:1,19-26:1,27-33:1"
eight = "0-4:1,5-8:1,9-12:1,13-17:1,18-21:1,22-25:1,26-29:1,30-33:1"
stages = {name: eight if name in ("interleaved", "zb-v", "dualpipe-v") else four for name in schedules}
common = {"batch": 8, "micro_batches": 8, "recompute": "none", "memory_bytes": "180GiB"}
plans = {name: autopar.plan(profile, "4xH100", schedule=name, stages=stages[name], **common) for name in schedules}
timelines = {name: plan.timeline() for name, plan in plans.items()}
plans["1f1b"].plot("timeline")

# %% [markdown]
# This is one step of `1f1b`, the classic. Each row is a GPU. Blue is a forward, orange a backward; the number is that
# of the micro-batch. First the pipeline fills, then every GPU does one forward and one backward in turn, then it
# drains. White is the bubble: the GPU waits.
#
# ## All seven, side by side
#
# The same axis of time for all. `to_frame()` gives the actions of a timeline as rows of a table, so a picture of your
# own is short.

# %% tags=["picture"]
colours = {"F": "#0072b2", "B": "#e69f00", "I": "#d55e00", "W": "#f0e442", "U": "#8b93a1"}
words = {"F": "forward", "B": "backward", "I": "input half", "W": "weight half", "U": "update"}

figure, rows = plt.subplots(len(schedules), 1, figsize=(11, 9), sharex=True, layout="constrained")
for axes, (name, timeline) in zip(rows, timelines.items(), strict=True):
    actions = timeline.to_frame().query("kind in @colours")
    for (rank, kind), own in actions.groupby(["rank", "kind"]):
        spans = list(zip(own.start_s, own.end_s - own.start_s, strict=True))
        axes.broken_barh(spans, (rank - 0.4, 0.8), color=colours[kind], edgecolor="white", linewidth=0.3)
    axes.set(xlim=(0, None), ylim=(3.6, -0.6), yticks=range(4), ylabel="GPU")
    axes.set_title(f"{name}: {timeline.end_s:.2f} s, bubble {timeline.bubble():.0%}", loc="left", fontsize=10)
rows[-1].set_xlabel("seconds since the step began")
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
figure.legend(handles, words.values(), loc="outside lower center", ncols=5, frameon=False)
plt.show()

# %% [markdown]
# - `gpipe` does all forwards first. It is the simplest.
# - `1f1b` begins its backwards early. So it keeps less.
# - `interleaved` gives every GPU several pieces of the model. The pipeline fills sooner.
# - The `zb` schedules cut a backward in two. The next GPU only needs the first half, and the second half fills what
#   would be a bubble.
# - `zb-v` and `dualpipe-v` lay the model to and fro, so that the first GPU also has the end.
#
# ## What is idle, what is kept
#
# A schedule has two prices: the time of a step, and the memory of the fullest GPU. In both panels, shorter is better.

# %%
table = pd.DataFrame(
    {
        "step, s": {name: plan.predicted.step_s for name, plan in plans.items()},
        "bubble, %": {name: 100 * plan.predicted.bubble for name, plan in plans.items()},
        "fullest GPU, GiB": {name: max(plan.predicted.peak_bytes) / 2**30 for name, plan in plans.items()},
    }
).round(2)
figure, both = plt.subplots(1, 2, figsize=(11, 2.8), sharey=True, layout="constrained")
for axes, column in zip(both, ("step, s", "fullest GPU, GiB"), strict=True):
    table[column][::-1].plot.barh(ax=axes, xlabel=column, color="#0072b2", width=0.7)
plt.show()

# %%
table

# %% [markdown]
# ## Memory over time
#
# What does a GPU hold, from the first forward to the update? Parameters and optimizer state stay. Activations come with
# each forward, and go with its backward. This is `1f1b`:

# %%
plans["1f1b"].plot("memory")

# %% [markdown]
# The activations make the difference between schedules. Counted in micro-batches, this is what the first GPU keeps:


# %%
def in_flight(timeline, rank):
    own = timeline.to_frame().query("rank == @rank and kind in ('F', 'B', 'W')")
    pieces = own.stage.nunique()
    kept = pd.Series([1 / pieces if kind == "F" else -1 / pieces for kind in own.kind], index=own.end_s)
    return kept.sort_index().cumsum()


figure, axes = plt.subplots(figsize=(11, 3.5), layout="constrained")
for name, timeline in timelines.items():
    in_flight(timeline, 0).plot(ax=axes, drawstyle="steps-post", label=name)
axes.set(xlabel="seconds since the step began", ylabel="micro-batches kept, first GPU")
axes.legend(ncols=7, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.15))
plt.show()

# %% [markdown]
# ## Which one is yours?
#
# Leave `schedule` out, and the planner tries all of them within the memory of your devices. More about each:
# [schedules](../docs/reference/schedules.md). Write one of your own in a screenful: [own
# schedule](../examples/own_schedule.py).
