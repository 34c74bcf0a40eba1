"""Models of the Transformers library, from their configuration: random weights, synthetic inputs, no network.

    autopar profile hf:llama/config.json --sequence 4096

``hf:`` takes a configuration, or a folder with a ``config.json`` (``pip install 'autopar[hf]'``). Parameters are random
float32, ``use_cache`` is off. The class is the first of ``architectures``; where there is none, or one without a loss,
the usual one of the ``model_type``, and a note says so.

The loss is the model's own. For tokens (language models, sequence to sequence, token classification) it is given as
``(sum, count)`` over the labels that are not -100, for pixels (segmentation) over those that are not 255, so that
micro-batches add up; for classes it is a mean over samples. With labels on every token of every sample the two agree. A
Transformers model that is given from Python, and returns its own loss, has its labels counted likewise.

Inputs are synthetic and the same at the same index: tokens of the vocabulary but no special ones, up to the most
positions that the configuration allows and at most 2048 (512 where it allows any number), or ``--sequence N`` of them,
which the profile records and a run keeps to; pixels and sounds of its sizes; labels for causal, masked and
sequence-to-sequence language models, for classification of sequences, tokens, images and audio, for extractive
questions, multiple choice, segmentation and speech to text. Other classes, such as those of images with text, need
``--data FILE``: a Python file with ``dataset()`` whose samples are dicts of the arguments of ``forward``, labels
included, and where needed ``collate``, ``loss``, ``optimizer``, ``scheduler`` or ``layers``.

Tried were 217 tiny configurations of Transformers 5.23 in training mode, cut at every boundary, with 4, 3 and 1
samples: causal and masked language models, sequence to sequence, speech to text, images and audio. Gradients of 133 are
the plain model's bit for bit, those of 84 to 1e-6 of the largest gradient: the same sums in another order. Refused are
DBRX, Llama 4, PhiMoE and RecurrentGemma; Longformer, I-BERT and YOSO; LED, FSMT and Switch; ``layerdrop`` above 0; and
``apply_spec_augment``, which draws NumPy's random numbers: turn the last two off in the configuration. Experts run as
grouped matrix products (``experts_implementation`` "grouped_mm"), whose shapes do not depend on values.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import Dataset

from autopar.errors import ModelError, UsageError, text_of
from autopar.formats.document import parse_json, read_text, value_text

_LONGEST = 2048
_SAMPLES = 65_536
IGNORED, IGNORED_PIXELS = -100, 255
_MASKED_SHARE = 0.15
_SOUND_SAMPLES = 16_000
_LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
_UNLIMITED_LENGTH = 512
"""Of models that bound no position: T5's own pre-training length."""


class Task(enum.Enum):
    """What a head is trained for, with the endings of the class names that it goes by."""

    CAUSAL = ("ForCausalLM", "LMHeadModel", "GenerationDecoder")
    MASKED = ("ForMaskedLM", "WithLMHeadModel")
    SEQUENCE_TO_SEQUENCE = ("ForConditionalGeneration", "ForTextToText", "MTModel")
    SEQUENCE_CLASSIFICATION = ("ForSequenceClassification",)
    TOKEN_CLASSIFICATION = ("ForTokenClassification",)
    QUESTION_ANSWERING = ("ForQuestionAnswering", "ForQuestionAnsweringSimple")
    MULTIPLE_CHOICE = ("ForMultipleChoice",)
    IMAGE_CLASSIFICATION = ("ForImageClassification", "ForImageClassificationWithTeacher")
    SEGMENTATION = ("ForSemanticSegmentation",)
    SPEECH_TO_TEXT = ()
    """Of the form of Whisper, which shares its ending with sequence to sequence."""
    AUDIO_CLASSIFICATION = ("ForAudioClassification",)

    @property
    def loss(self) -> Callable[..., Any] | None:
        """``(sum, count)`` over labelled tokens or pixels; none where the model's own mean is over samples."""
        if self is Task.CAUSAL:
            return partial(_sum_and_count, shift=True)
        if self in (Task.MASKED, Task.SEQUENCE_TO_SEQUENCE, Task.SPEECH_TO_TEXT, Task.TOKEN_CLASSIFICATION):
            return _sum_and_count
        return partial(_sum_and_count, ignore_index=IGNORED_PIXELS) if self is Task.SEGMENTATION else None

    @property
    def ignore_index(self) -> int:
        """The label that does not count."""
        return IGNORED_PIXELS if self is Task.SEGMENTATION else IGNORED


def task_of(architecture: str, config: Any) -> Task | None:  # noqa: ANN401
    """Return the task of a class by its name; none if it is not known what the class reads."""
    found = next((task for task in reversed(Task) if architecture.endswith(task.value)), None)
    if found is Task.SEQUENCE_CLASSIFICATION and hasattr(config, "conv_stride"):
        return Task.AUDIO_CLASSIFICATION
    if found is Task.SEQUENCE_TO_SEQUENCE:
        if all(hasattr(config, name) for name in ("num_mel_bins", "max_source_positions", "max_target_positions")):
            return Task.SPEECH_TO_TEXT
        # Models of images or sounds and text bear the same ending; what their processors make of those is not known.
        mixed = hasattr(config, "num_mel_bins") or {"vision_config", "audio_config"} & config.sub_configs.keys()
        return found if getattr(config, "is_encoder_decoder", False) and not mixed else None
    return found


def _sum_and_count(
    output: Any,  # noqa: ANN401
    batch: object,
    *,
    shift: bool = False,
    ignore_index: int = IGNORED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own loss is a mean over what is labelled, and not a number where nothing is labelled."""
    if not isinstance(batch, Mapping) or "labels" not in batch:
        raise ModelError(
            "the samples hold no labels; make them dicts of forward's arguments with labels, or define loss(output, "
            "batch) beside dataset()"
        )
    labels: torch.Tensor = batch["labels"][:, 1:] if shift else batch["labels"]
    mean: torch.Tensor = output["loss"]
    count = (labels != ignore_index).sum()
    return torch.where(count > 0, mean * count, torch.zeros_like(mean)), count


class _SyntheticDataset(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, pixels or sounds with random labels: the sample at an index is always the same."""

    def __init__(self, task: Task, config: Any, architecture: type, sequence: int | None) -> None:  # noqa: ANN401
        self.task, self.config = task, config
        text = _text_config(task, config)
        self.vocabulary = int(getattr(text, "vocab_size", None) or 2)
        self.length = sequence or 0
        self.special = sorted(_special_tokens(config) | _special_tokens(text))
        self.arguments = _arguments(architecture)

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return _MAKERS[self.task](self, generator)

    def tokens(self, generator: torch.Generator, *leading: int) -> torch.Tensor:
        """Return ordinary tokens of shape (..., length): no padding, no end of sequence."""
        drawn = torch.randint(self.vocabulary, (*leading, self.length), generator=generator)
        ordinary = next((token for token in range(self.vocabulary) if token not in self.special), 0)
        return torch.where(torch.isin(drawn, torch.tensor(self.special, dtype=torch.long)), ordinary, drawn)

    def one_of(self, count: int, generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randint(max(1, count), shape, generator=generator)

    def text(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        tokens = self.tokens(generator)
        if self.task is Task.CAUSAL:
            return {"input_ids": tokens, "labels": tokens.clone()}
        masked = torch.rand(self.length, generator=generator) < _MASKED_SHARE
        masked[0] = True
        return {"input_ids": tokens, "labels": torch.where(masked, tokens, IGNORED)}

    def speech(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        config = self.config
        # The encoder halves the number of frames.
        sound = torch.randn(config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return {"input_features": sound, **self.target(generator)}

    def target(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return labels, and the decoder's inputs: the labels one place later behind the start token."""
        labels = self.tokens(generator)
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        stated = (getattr(self.config, name, None) for name in names)
        first = torch.tensor([next((token for token in stated if isinstance(token, int)), 0)])
        return {"decoder_input_ids": torch.cat((first, labels[:-1])), "labels": labels}

    def sequence_class(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        tokens, end = self.tokens(generator), getattr(self.config, "eos_token_id", None)
        if isinstance(end, int):
            tokens[-1] = end
        return {"input_ids": tokens, "labels": self.classes(generator)}

    def classes(self, generator: torch.Generator) -> torch.Tensor:
        """Return one sample's label, of the kind that the problem wants."""
        count, problem = self.config.num_labels, getattr(self.config, "problem_type", None)
        if problem == "regression" or (problem is None and count == 1):
            return torch.randn((count,) if count > 1 else (), generator=generator)
        if problem == "multi_label_classification":
            return self.one_of(2, generator, count).float()
        return self.one_of(count, generator)

    def token_classes(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        labels = self.one_of(self.config.num_labels, generator, self.length)
        return {"input_ids": self.tokens(generator), "labels": labels}

    def question(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        start, end = self.one_of(self.length, generator), self.one_of(self.length, generator)
        return {"input_ids": self.tokens(generator), "start_positions": start, "end_positions": end}

    def pixels(self, generator: torch.Generator) -> torch.Tensor:
        """Return one image of shape (channels, height, width)."""
        vision = getattr(self.config, "vision_config", self.config)
        size = getattr(vision, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
        return torch.randn(getattr(vision, "num_channels", 3), height, width, generator=generator)

    def segments(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        pixels = self.pixels(generator)
        labels = self.one_of(self.config.num_labels, generator, *pixels.shape[1:])
        return {"pixel_values": pixels, "labels": labels}

    def sound_class(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        config = self.config
        if "input_values" not in self.arguments:
            features = getattr(config, "feature_projection_input_dim", 80)
            sound = torch.randn(_UNLIMITED_LENGTH, features, generator=generator)
            return {"input_features": sound, "labels": self.classes(generator)}
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            shape: tuple[int, ...] = (config.max_length, config.num_mel_bins)
        else:
            shape = (_SOUND_SAMPLES,)
        return {"input_values": torch.randn(shape, generator=generator), "labels": self.classes(generator)}


_MAKERS: dict[Task, Callable[[_SyntheticDataset, torch.Generator], dict[str, torch.Tensor]]] = {
    Task.CAUSAL: _SyntheticDataset.text,
    Task.MASKED: _SyntheticDataset.text,
    Task.SEQUENCE_TO_SEQUENCE: lambda data, generator: {"input_ids": data.tokens(generator), **data.target(generator)},
    Task.SEQUENCE_CLASSIFICATION: _SyntheticDataset.sequence_class,
    Task.TOKEN_CLASSIFICATION: _SyntheticDataset.token_classes,
    Task.QUESTION_ANSWERING: _SyntheticDataset.question,
    Task.MULTIPLE_CHOICE: lambda data, generator: {
        "input_ids": data.tokens(generator, 2),
        "labels": data.one_of(2, generator),
    },
    Task.IMAGE_CLASSIFICATION: lambda data, generator: {
        "pixel_values": data.pixels(generator),
        "labels": data.classes(generator),
    },
    Task.SEGMENTATION: _SyntheticDataset.segments,
    Task.SPEECH_TO_TEXT: _SyntheticDataset.speech,
    Task.AUDIO_CLASSIFICATION: _SyntheticDataset.sound_class,
}


def _text_config(task: Task, config: Any) -> Any:  # noqa: ANN401
    return config.get_text_config(decoder=True) if task is Task.CAUSAL else config.get_text_config()


def _positions(config: Any, architecture: type) -> int | None:  # noqa: ANN401
    """Return how many tokens have positions; none where the configuration does not bound them."""
    stated = [getattr(config, name, None) for name in _LENGTHS]
    lengths = [value for value in stated if isinstance(value, int) and value > 0]
    variables = vars(sys.modules[architecture.__module__])
    kinds = [kind for kind in variables.values() if isinstance(kind, type)]
    # As in RoBERTa, where positions are counted from behind the padding token, so that the first are not used.
    name = "create_position_ids_from_input_ids"
    if lengths and (name in variables or any(hasattr(kind, name) for kind in kinds)):
        return min(lengths) - (config.pad_token_id or 0) - 1
    return min(lengths, default=None)


def _special_tokens(config: Any) -> set[int]:  # noqa: ANN401
    values = (value for name, value in vars(config).items() if name.endswith("_token_id"))
    flat = (item for value in values for item in (value if isinstance(value, (list, tuple)) else [value]))
    return {item for item in flat if isinstance(item, int)}


PREFIX = "hf:"
_CONFIG = "config.json"
SYNTHETIC = "inputs are synthetic, of the configuration's shapes"
# No published model comes near; beyond them sizes overflow or building does not end.
MOST_LAYERS, LARGEST_SIZE = 10_000, 2**31 - 1
_MOST_LETTERS = 300
"""Of what the library says."""
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


class _ConfiguredModel:
    """A configuration file, and what a model file would define for its model."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.path = path
        self.sha256 = hashlib.sha256(source).hexdigest()
        self._transformers = _library()
        self._content: Any = parse_json(source.decode(), path)
        if not isinstance(self._content, dict):
            raise ModelError(f"{path}: holds a {type(self._content).__name__}; a configuration is a JSON object")
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
            raise ModelError(f"{self.path}: model_type {value_text(kind)} is none that transformers {version} knows")
        try:
            config = known[kind].from_dict(dict(self._content))
        except Exception as error:
            raise ModelError(
                f"{self.path}: transformers refuses the configuration: {text_of(error)[:_MOST_LETTERS]}"
            ) from error
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            _check_sizes(self.path, part)
            part.use_cache = False
        config.return_dict, config.output_attentions, config.output_hidden_states = True, False, False
        return config

    def _choose(self, config: Any) -> tuple[type[nn.Module], tuple[str, ...]]:  # noqa: ANN401
        """Return the class to train: the one that the configuration names, else a usual one for its kind."""
        named = self._content.get("architectures") or []
        if named and (not isinstance(named, list) or not isinstance(named[0], str)):
            raise ModelError(f"{self.path}: architectures is {value_text(named)}; it must be a list of class names")
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
            raise ModelError(
                f"{self.path}: architecture {value_text(named[0])} is none that transformers {version} knows"
            )
        if usual is not None and task_of(named[0], config) is None and "labels" not in _arguments(chosen):
            return usual, (f"{named[0]} has no loss; {usual.__name__} is trained",)
        return chosen, ()

    def build(self) -> nn.Module:
        """Build the model with random weights in float32."""
        config = self.config()
        if self.task is Task.SEQUENCE_CLASSIFICATION and config.pad_token_id is None:
            # Models that read the last token of a sequence look for the padding behind it.
            config.pad_token_id = 0
        made: nn.Module = self.architecture._from_config(config, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def sequence(self, length: int | None) -> int | None:
        """Return the tokens of a synthetic sample's sequence, as asked or as usual; none where it has none.

        Raises:
            UsageError: samples are no sequences, or have no such ones.
        """
        config, name = self.config(), self.architecture.__name__
        if self.task in (None, Task.IMAGE_CLASSIFICATION, Task.SEGMENTATION, Task.AUDIO_CLASSIFICATION):
            if length is None:
                return None
            why = f"{name} reads no sequences of tokens" if self.task else f"no inputs are known for {name}"
            raise UsageError(f"`sequence={length}`: {why}; leave it out")
        most = _positions(_text_config(self.task, config), self.architecture)
        usual = min(_UNLIMITED_LENGTH if most is None else most, _LONGEST)
        if self.task is Task.SPEECH_TO_TEXT:
            most = min(most or config.max_target_positions, config.max_target_positions)
        if length is None:
            return max(2, usual if most is None else min(most, usual))
        if length < 2:
            raise UsageError(f"`sequence={length}`: a sequence has at least 2 tokens")
        if most is not None and length > most:
            raise UsageError(
                f"`sequence={length}`: the configuration has positions for sequences of up to {most}; use "
                f"`sequence={most}`"
            )
        return length

    def dataset(self, sequence: int | None) -> _SyntheticDataset:
        """Return samples of the configuration's shapes, the same at the same index, with sequences so long.

        Raises:
            ModelError: it is not known what the architecture reads.
        """
        if self.task is None:
            raise ModelError(
                f"{self.path}: no inputs are known for {self.architecture.__name__}; give `data`, a Python file "
                "with a dataset() whose samples are dicts of forward's arguments, labels included"
            )
        return _SyntheticDataset(self.task, self.config(), self.architecture, sequence)

    @property
    def loss(self) -> Callable[..., Any] | None:
        """Of labelled tokens: sum and count, so that micro-batches add up. None: the model's own mean over samples."""
        return self.task.loss if self.task is not None else None


def read_configured(spec: str) -> _ConfiguredModel:
    """Read ``hf:DIR`` or ``hf:FILE``; nothing is ever downloaded.

    Raises:
        UsageError: the transformers library is not installed.
        ModelError: the file is missing, or is no configuration that the library knows.
    """
    path = Path(spec.removeprefix(PREFIX))
    if not spec.removeprefix(PREFIX):
        raise UsageError(f"{spec}: give hf: and a folder with a {_CONFIG}, or a configuration file")
    if path.is_dir():
        path = path / _CONFIG
    if not path.exists():
        raise ModelError(f"{path}: no such configuration; models are read from local files, nothing is downloaded")
    return _ConfiguredModel(path, read_text(path, "configuration").encode())


def _library() -> ModuleType:
    """Import transformers, kept from the network and from chatting."""
    try:
        with patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}), contextlib.redirect_stdout(sys.stderr):
            # The library decides when it is imported whether it may use the network.
            import huggingface_hub.constants
            import transformers
    except ImportError as error:
        raise UsageError("hf: models need the transformers library; pip install 'autopar[hf]'") from error
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return transformers


def _check_sizes(path: Path, config: Any) -> None:  # noqa: ANN401
    for name in _SIZES:
        value = getattr(config, name, None)
        most = MOST_LAYERS if name == "num_hidden_layers" else LARGEST_SIZE
        if isinstance(value, int) and not 1 <= value <= most:
            known = config.attribute_map.get(name, name)
            raise ModelError(f"{path}: {known} is {value_text(value)}; it must be between 1 and {most}")


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


def _arguments(architecture: type) -> set[str]:
    return set(inspect.signature(architecture.forward).parameters)  # type: ignore[attr-defined]
