"""Models of the Transformers library, from their configuration: random weights, synthetic inputs, no network."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from autopar.capture.synthetic import SyntheticDataset, Task, sequence_of, task_of
from autopar.errors import ModelError, UsageError
from autopar.formats.document import parse_json, read_text, shown

PREFIX = "hf:"
CONFIG = "config.json"
SYNTHETIC = "inputs are synthetic, of the configuration's shapes"
# No published model comes near; beyond them sizes overflow or building does not end.
MOST_LAYERS, LARGEST_SIZE = 10_000, 2**31 - 1
MOST_LETTERS = 300
"""Of what the library says."""
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


class Configured:
    """A configuration file, and what a model file would define for its model."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.path = path
        self.sha256 = hashlib.sha256(source).hexdigest()
        self._transformers = _library()
        self._content = _parse(path, source)
        config = self.config()
        self.architecture, self.notes = self._choose(config)
        task = task_of(self.architecture.__name__, config)
        text_is_read = "input_ids" in _arguments(self.architecture)
        self.task = task if text_is_read or task is not Task.SEQUENCE_TO_SEQUENCE else None

    def config(self) -> Any:  # noqa: ANN401
        """Return a fresh configuration object, as training needs it: nothing is cached or returned beside the loss.

        Raises:
            ModelError: the library does not know the kind of model, or refuses a value.
        """
        kind = self._content.get("model_type")
        known = self._transformers.CONFIG_MAPPING
        version = self._transformers.__version__
        if not isinstance(kind, str):
            raise ModelError(f"{self.path}: has no model_type; give a Transformers configuration")
        if kind not in known:
            raise ModelError(f"{self.path}: model_type {shown(kind)} is none that transformers {version} knows")
        try:
            config = known[kind].from_dict(dict(self._content))
        except Exception as error:
            raise ModelError(f"{self.path}: transformers refuses the configuration: {_one_line(error)}") from error
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            _check_sizes(self.path, part)
            part.use_cache = False
        config.return_dict, config.output_attentions, config.output_hidden_states = True, False, False
        return config

    def _choose(self, config: Any) -> tuple[type[nn.Module], tuple[str, ...]]:  # noqa: ANN401
        """Return the class to train: the one that the configuration names, else a usual one for its kind."""
        named = self._content.get("architectures") or []
        if named and (not isinstance(named, list) or not isinstance(named[0], str)):
            raise ModelError(f"{self.path}: architectures is {shown(named)}; it must be a list of class names")
        usual = _usual_class(config)
        if not named:
            if usual is None:
                raise ModelError(
                    f"{self.path}: names no architectures, and model_type {config.model_type!r} has no usual one with "
                    "a loss; add the class to architectures"
                )
            return usual, (f"the configuration names no architecture; {usual.__name__} is trained",)
        chosen = getattr(self._transformers, named[0], None)
        if not isinstance(chosen, type) or not issubclass(chosen, self._transformers.PreTrainedModel):
            version = self._transformers.__version__
            raise ModelError(f"{self.path}: architecture {shown(named[0])} is none that transformers {version} knows")
        if usual is not None and task_of(named[0], config) is None and "labels" not in _arguments(chosen):
            return usual, (f"{named[0]} has no loss; {usual.__name__} is trained",)
        return chosen, ()

    def build(self) -> nn.Module:
        """Build the model with random weights in float32."""
        import torch

        config = self.config()
        if self.task is Task.SEQUENCE_CLASSIFICATION and config.pad_token_id is None:
            # Models that read the last token of a sequence look for the padding behind it.
            config.pad_token_id = 0
        made: nn.Module = self.architecture._from_config(config, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def sequence(self, asked: int | None) -> int | None:
        """Return the tokens of a synthetic sample's sequence, as asked or as usual; none where it has none.

        Raises:
            UsageError: samples are no sequences, or have no such ones.
        """
        if self.task is not None:
            return sequence_of(self.task, self.config(), self.architecture, asked)
        if asked is not None:
            raise UsageError(f"`sequence={asked}`: no inputs are known for {self.architecture.__name__}; leave it out")
        return None

    def dataset(self, sequence: int | None = None) -> SyntheticDataset:
        """Return samples of the configuration's shapes, the same at the same index, with sequences so long.

        Raises:
            ModelError: it is not known what the architecture reads.
        """
        if self.task is None:
            raise ModelError(
                f"{self.path}: no inputs are known for {self.architecture.__name__}; give `data`, a Python file "
                "with a dataset() whose samples are dicts of forward's arguments, labels included"
            )
        return SyntheticDataset(self.task, self.config(), self.architecture, sequence)

    @property
    def loss(self) -> Callable[..., Any] | None:
        """Of labelled tokens: sum and count, so that micro-batches add up. None: the model's own mean over samples."""
        return self.task.loss if self.task is not None else None


def read_configured(spec: str) -> Configured:
    """Read ``hf:DIR`` or ``hf:FILE``; nothing is ever downloaded.

    Raises:
        UsageError: the transformers library is not installed.
        ModelError: the file is missing, or is no configuration that the library knows.
    """
    path = Path(spec.removeprefix(PREFIX))
    if not spec.removeprefix(PREFIX):
        raise UsageError(f"{spec}: give hf: and a folder with a {CONFIG}, or a configuration file")
    if path.is_dir():
        path = path / CONFIG
    if not path.exists():
        raise ModelError(f"{path}: no such configuration; models are read from local files, nothing is downloaded")
    return Configured(path, read_text(path, "configuration").encode())


def _library() -> ModuleType:
    """Import transformers, kept from the network and from chatting."""
    try:
        with _offline(), contextlib.redirect_stdout(sys.stderr):
            import huggingface_hub.constants
            import transformers
    except ImportError as error:
        raise UsageError("hf: models need the transformers library; pip install 'autopar[hf]'") from error
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return transformers


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """The library decides when it is imported whether it may use the network."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def _parse(path: Path, source: bytes) -> dict[str, Any]:
    content = parse_json(source.decode(), path)
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a {type(content).__name__}; a configuration is a JSON object")
    return content


def _check_sizes(path: Path, config: Any) -> None:  # noqa: ANN401
    for name in _SIZES:
        value = getattr(config, name, None)
        most = MOST_LAYERS if name == "num_hidden_layers" else LARGEST_SIZE
        if isinstance(value, int) and not 1 <= value <= most:
            known = config.attribute_map.get(name, name)
            raise ModelError(f"{path}: {known} is {shown(value)}; it must be between 1 and {most}")


def _usual_class(config: Any) -> type[nn.Module] | None:  # noqa: ANN401
    from transformers.models.auto import modeling_auto as auto

    masked, causal = auto.MODEL_FOR_MASKED_LM_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING
    order: list[Any] = [
        masked,
        causal,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
        auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    ]
    if getattr(config, "is_decoder", False):
        order.insert(0, causal)
    if getattr(config, "is_encoder_decoder", False):
        order = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, *order]
    for mapping in order:
        if type(config) in mapping:
            found = mapping[type(config)]
            chosen: type[nn.Module] = found[0] if isinstance(found, tuple) else found
            return chosen
    return None


def _arguments(architecture: type[nn.Module]) -> set[str]:
    return set(inspect.signature(architecture.forward).parameters)


def _one_line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:MOST_LETTERS]
