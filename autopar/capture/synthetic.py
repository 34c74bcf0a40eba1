"""Synthetic samples of the shapes that a Transformers configuration states, for the tasks that are known."""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from autopar.errors import ModelError, UsageError

LONGEST = 2048
SAMPLES = 65_536
IGNORED, IGNORED_PIXELS = -100, 255
MASKED_SHARE = 0.15
SOUND_SAMPLES = 16_000
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
            return _shifted_token_loss
        if self in (Task.MASKED, Task.SEQUENCE_TO_SEQUENCE, Task.SPEECH_TO_TEXT, Task.TOKEN_CLASSIFICATION):
            return _token_loss
        if self is Task.SEGMENTATION:
            return _pixel_loss
        return None

    @property
    def reads_tokens(self) -> bool:
        """Whether samples are sequences of tokens, or have labels that are."""
        return self not in (Task.IMAGE_CLASSIFICATION, Task.SEGMENTATION, Task.AUDIO_CLASSIFICATION)

    @property
    def ignored(self) -> int:
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


def _shifted_token_loss(output: Any, batch: object) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    return _sum_and_count(output, _labels(batch)[:, 1:])


def _token_loss(output: Any, batch: object) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    return _sum_and_count(output, _labels(batch))


def _pixel_loss(output: Any, batch: object) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    return _sum_and_count(output, _labels(batch), IGNORED_PIXELS)


def _labels(batch: object) -> torch.Tensor:
    if not isinstance(batch, Mapping) or "labels" not in batch:
        raise ModelError(
            "the samples hold no labels; make them dicts of forward's arguments with labels, or define loss(output, "
            "batch) beside dataset()"
        )
    labels: torch.Tensor = batch["labels"]
    return labels


def _sum_and_count(
    output: Any,  # noqa: ANN401
    labels: torch.Tensor,
    ignored: int = IGNORED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own loss is a mean over what is labelled, and not a number where nothing is labelled."""
    mean: torch.Tensor = output["loss"]
    count = (labels != ignored).sum()
    return torch.where(count > 0, mean * count, torch.zeros_like(mean)), count


class SyntheticDataset(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, pixels or sounds with random labels: the sample at an index is always the same."""

    def __init__(self, task: Task, config: Any, architecture: type, sequence: int | None = None) -> None:  # noqa: ANN401
        self.task, self.config = task, config
        text = _text_config(task, config)
        self.vocabulary = int(getattr(text, "vocab_size", None) or 2)
        self.length = sequence or _length(text, architecture)
        self.special = sorted(_special_tokens(config) | _special_tokens(text))
        self.arguments = set(inspect.signature(architecture.forward).parameters)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return SAMPLES

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
        masked = torch.rand(self.length, generator=generator) < MASKED_SHARE
        masked[0] = True
        return {"input_ids": tokens, "labels": torch.where(masked, tokens, IGNORED)}

    def pairs(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens(generator), **self.target(generator)}

    def speech(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        config = self.config
        # The encoder halves the number of frames.
        sound = torch.randn(config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        self.length = min(self.length, config.max_target_positions)
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

    def choices(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens(generator, 2), "labels": self.one_of(2, generator)}

    def pixels(self, generator: torch.Generator) -> torch.Tensor:
        """Return one image of shape (channels, height, width)."""
        vision = getattr(self.config, "vision_config", self.config)
        size = getattr(vision, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
        return torch.randn(getattr(vision, "num_channels", 3), height, width, generator=generator)

    def image_class(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pixels(generator), "labels": self.classes(generator)}

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
            shape = (SOUND_SAMPLES,)
        return {"input_values": torch.randn(shape, generator=generator), "labels": self.classes(generator)}


_MAKERS: dict[Task, Callable[[SyntheticDataset, torch.Generator], dict[str, torch.Tensor]]] = {
    Task.CAUSAL: SyntheticDataset.text,
    Task.MASKED: SyntheticDataset.text,
    Task.SEQUENCE_TO_SEQUENCE: SyntheticDataset.pairs,
    Task.SEQUENCE_CLASSIFICATION: SyntheticDataset.sequence_class,
    Task.TOKEN_CLASSIFICATION: SyntheticDataset.token_classes,
    Task.QUESTION_ANSWERING: SyntheticDataset.question,
    Task.MULTIPLE_CHOICE: SyntheticDataset.choices,
    Task.IMAGE_CLASSIFICATION: SyntheticDataset.image_class,
    Task.SEGMENTATION: SyntheticDataset.segments,
    Task.SPEECH_TO_TEXT: SyntheticDataset.speech,
    Task.AUDIO_CLASSIFICATION: SyntheticDataset.sound_class,
}


def sequence_of(task: Task, config: Any, architecture: type, asked: int | None) -> int | None:  # noqa: ANN401
    """Return the tokens of a sample's sequence, as asked or as usual; none where samples are no sequences.

    Raises:
        UsageError: samples are no sequences, or so long a one has no position for every token.
    """
    if not task.reads_tokens:
        if asked is not None:
            raise UsageError(f"`sequence={asked}`: {architecture.__name__} reads no sequences of tokens; leave it out")
        return None
    text = _text_config(task, config)
    most = _positions(text, architecture)
    if task is Task.SPEECH_TO_TEXT:
        most = min(most or config.max_target_positions, config.max_target_positions)
    if asked is None:
        return _length(text, architecture) if most is None else max(2, min(most, _length(text, architecture)))
    if asked < 2:
        raise UsageError(f"`sequence={asked}`: a sequence has at least 2 tokens")
    if most is not None and asked > most:
        raise UsageError(
            f"`sequence={asked}`: the configuration has positions for sequences of up to {most}; use `sequence={most}`"
        )
    return asked


def _text_config(task: Task, config: Any) -> Any:  # noqa: ANN401
    return config.get_text_config(decoder=True) if task is Task.CAUSAL else config.get_text_config()


def _positions(config: Any, architecture: type) -> int | None:  # noqa: ANN401
    """Return how many tokens have positions; none where the configuration does not bound them."""
    stated = [getattr(config, name, None) for name in _LENGTHS]
    lengths = [value for value in stated if isinstance(value, int) and value > 0]
    if lengths and _positions_follow_padding(architecture):
        return min(lengths) - (config.pad_token_id or 0) - 1
    return min(lengths, default=None)


def _length(config: Any, architecture: type) -> int:  # noqa: ANN401
    most = _positions(config, architecture)
    return max(2, min(_UNLIMITED_LENGTH if most is None else most, LONGEST))


def _positions_follow_padding(architecture: type) -> bool:
    """Whether positions are counted from behind the padding token, as in RoBERTa, so that the first are not used."""
    module = sys.modules[architecture.__module__]
    name = "create_position_ids_from_input_ids"
    return hasattr(module, name) or any(hasattr(kind, name) for kind in vars(module).values() if isinstance(kind, type))


def _special_tokens(config: Any) -> set[int]:  # noqa: ANN401
    values = (value for name, value in vars(config).items() if name.endswith("_token_id"))
    flat = (item for value in values for item in (value if isinstance(value, (list, tuple)) else [value]))
    return {item for item in flat if isinstance(item, int)}
