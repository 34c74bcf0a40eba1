"""Model files: the functions that one may have, and how a model is taken apart, from the code that does so."""

from __future__ import annotations

from inspect import isfunction
from types import ModuleType

from autopar.capture.layers import build, evaluation, export, fallback, losses, segment
from autopar.capture.model import batch, hooks, huggingface, meta, optimizer, python_state, source
from reference_pages.text import body, inline, markdown, page, signature, table

TOPICS: dict[str, tuple[ModuleType, ...]] = {
    "Samples and batches, and data that is read more than once": (batch,),
    "The loss: means and counts": (losses,),
    "Optimizers: parameters by name": (optimizer,),
    "How a model becomes layers": (export, segment),
    "Buffers that a forward writes, and how many samples it takes": (build,),
    "Models that cannot be captured, and pipeline plans of Transformers models": (fallback,),
    "Python state": (python_state,),
    "Evaluation mode": (evaluation,),
    "Transformers models: hf:": (huggingface,),
    "Models larger than memory": (meta,),
    "Which files are the model's": (source,),
}
"""Modules by heading; their docstrings, but for the titles, are what the page says."""
_INTRODUCTION = """
```python
import torch


def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def dataset():
    return [(torch.randn(8), index % 2) for index in range(256)]


def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])
```
"""


def model_file_page() -> str:
    """Return the page of the model file."""
    functions = {name: value for name, value in vars(hooks.ModelFile).items() if isfunction(value) and name[0] != "_"}
    rows = (
        [f"[`{hooks.HOOKS[name].call(name)}`](#{name})", _first(value.__doc__)] for name, value in functions.items()
    )
    parts = [f"## {name}\n\n{signature(name, value)}\n\n{markdown(value.__doc__)}" for name, value in functions.items()]
    parts.append(f"## ignored_state\n\n{markdown(hooks.IGNORED_STATE)}")
    parts.append(f"## whole_batches\n\n{markdown(hooks.WHOLE_BATCHES)}")
    for heading, modules in TOPICS.items():
        parts += [f"## {heading}", *(body(each.__doc__) for each in modules)]
    said = markdown(hooks.ModelFile.__doc__)
    index = table(["function", ""], rows)
    return page("The model file", "the code in `autopar/capture/`", _INTRODUCTION, said, index, *parts)


def _first(docstring: str | None) -> str:
    return inline((docstring or "").strip().split("\n")[0])
