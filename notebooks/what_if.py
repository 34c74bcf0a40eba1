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
# # What if?
#
# What if you had more GPUs, less memory, or a slower network? Turn a slider and see. Your plan is priced again at once.
# A better plan for the new machines follows some seconds later, when a search has found it.
#
# The model is Llama 3 8B on H100s. You need none of them, and no weights.

# %%
# %matplotlib inline
import io
import threading
import time

import ipywidgets as widgets
from IPython.display import Image, display
from matplotlib.figure import Figure

import autopar

# %% [markdown]
# ## The model
#
# A profile says what every layer costs. This one was estimated from the model's sizes and an H100's data sheet. These
# two lines made it, in a minute:
#
# ```python
# profile = autopar.estimate("hf:data/llama", 8, device="H100", precision="bf16", sequence=4096)
# profile.save("data/llama.profile.json")
# ```

# %%
profile = autopar.Profile.load("data/llama.profile.json")
profile.plot()

# %% [markdown]
# ## Your plan
#
# You have two nodes of eight GPUs, with 400 Gbit/s between them. So that searches take seconds, ask for one schedule
# and eight micro-batches. Leave these three options out, and the search looks at all schedules, for a minute or so.


# %%
def machines(gpus, gbps):
    return autopar.Cluster.of(f"{gpus // 8}x8xH100:{gbps}Gbps")


options = {"schedule": "1f1b", "micro_batches": 8, "gap": 0.1}
plan = autopar.plan(profile, machines(16, 400), batch=64, **options)
plan.plot("stages")

# %% [markdown]
# The upper panel has the time of a micro-batch on every stage, the lower one the memory of its fullest GPU. The line is
# what an H100 has.
#
# ## The same plan on another network
#
# `plan.reprice` predicts the same stages on other machines. It searches nothing, so it takes a moment. Here are six
# networks:

# %%
networks = [25, 50, 100, 200, 400, 800]
steps = [plan.reprice(machines(16, gbps)).predicted.step_s for gbps in networks]

figure = Figure(figsize=(7, 2.6), layout="constrained")
axes = figure.subplots()
axes.plot(networks, steps, "o-", color="#0072b2")
axes.set(xscale="log", xticks=networks, xticklabels=networks, ylim=(0, 1.1 * max(steps)))
axes.minorticks_off()
axes.set(xlabel="Gbit/s between nodes", ylabel="step, s", title="Your plan")
figure

# %% [markdown]
# ## The picture of an answer
#
# An answer has two rows: your plan, and the one that a search finds for the new machines. The dashed line is the memory
# of a GPU. A plan that needs more is red there, and its time is grey: it cannot run.

# %%
drawing = threading.Lock()


def answer(question, own, best=None):
    """Draw seconds and memory of both plans; `own` may be the reason why there is no such plan."""
    rows = {"your plan": own, "found plan": best or "searching ..."}
    figure = Figure(figsize=(9, 2))
    time_axes, memory_axes = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.1, right=0.98, top=0.86, bottom=0.24, wspace=0.05)
    for at, plan in enumerate(rows.values()):
        if isinstance(plan, str):
            time_axes.text(0, at, f" {plan}", va="center")
            continue
        peak, limit = max(plan.predicted.peak_bytes), min(plan.predicted.limit_bytes)
        fits = peak <= limit
        time_axes.barh(at, plan.predicted.step_s, color="#0072b2" if fits else "#d9dce1")
        said = f" {plan.predicted.step_s:.2f} s, {len(plan.stages)} stages"
        time_axes.text(0, at, said, va="center", color="white" if fits else "black")
        memory_axes.barh(at, peak / 2**30, color="#009e73" if fits else "#d55e00")
        memory_axes.axvline(limit / 2**30, color="black", linestyle="--")
    time_axes.set_yticks(range(2), list(rows))
    time_axes.set(xlabel="step, s", ylim=(1.6, -0.6))
    memory_axes.set(xlabel="fullest GPU, GiB")
    figure.suptitle(question, fontsize=10)
    return figure


# %% [markdown]
# ## The search behind it
#
# A search runs in a thread. It tells what it does, again and again. If you have moved on meanwhile, the function that
# it tells raises an error, and that ends the search.


# %%
class MovedOnError(Exception):
    """There is a newer question."""


class Search(threading.Thread):
    def __init__(self, then, **question):
        super().__init__(daemon=True)
        self.then, self.question, self.stopped = then, question, threading.Event()

    def told(self, what, share):
        if self.stopped.is_set():
            raise MovedOnError

    def run(self):
        # While a slider moves, questions follow each other: wait a little for the last one.
        if self.stopped.wait(0.3):
            return
        try:
            self.then(autopar.plan(profile, progress=self.told, **self.question, **options))
        except autopar.InfeasibleError:
            self.then("no plan fits the memory")
        except MovedOnError:
            pass


# %% [markdown]
# ## Turn it
#
# With a kernel, you see four sliders below, and the answer under them. On GitHub you see none; go on to the next
# section.

# %%
gpus = widgets.SelectionSlider(options=[8, 16, 24, 32], value=16, description="GPUs")
memory = widgets.IntSlider(80, 24, 96, 8, description="GiB each")
gbps = widgets.SelectionSlider(options=networks, value=400, description="Gbit/s")
batch = widgets.SelectionSlider(options=[64, 128, 256, 512], value=64, description="batch")
sliders = gpus, memory, gbps, batch
shown = widgets.Image(format="png")
searches = []


def show(*what):
    with drawing:
        png = io.BytesIO()
        answer(*what).savefig(png, format="png", dpi=80)
        shown.value = png.getvalue()


def turn(change=None):
    for search in searches:
        search.stopped.set()
    question = f"{gpus.value} GPUs of {memory.value} GiB, {gbps.value} Gbit/s, {batch.value} samples"
    asked = {"cluster": machines(gpus.value, gbps.value), "batch": batch.value, "memory_bytes": f"{memory.value}GiB"}
    try:
        own = plan.reprice(**asked)
    except autopar.UsageError:
        own = f"needs {len(plan.devices)} GPUs"
    show(question, own)
    searches[:] = [Search(lambda best: show(question, own, best), **asked)]
    searches[0].start()


for slider in sliders:
    slider.observe(turn, "value")
turn()
display(widgets.VBox([widgets.HBox(sliders[:2]), widgets.HBox(sliders[2:]), shown]))

# %% [markdown]
# ## Three turns
#
# Code can move a slider, too. Here it does so three times, takes the time of each answer, and waits for the search.

# %% tags=["picture"]
for slider, value in ((gbps, 50), (memory, 40), (gpus, 24)):
    begin, begin_here = time.perf_counter(), time.thread_time()
    slider.value = value
    seconds, own_seconds = time.perf_counter() - begin, time.thread_time() - begin_here
    print(
        f"answered after {seconds:.2f} s, of which {own_seconds:.2f} s are the answer's own, and the rest other work's"
    )
    searches[0].join()
    display(Image(shown.value))
