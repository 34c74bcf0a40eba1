"""Imports: files of other systems become profiles, or stages that the planner is told.

There is a function for each kind that ``autopar import`` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.api.inputs import given_profile
from autopar.api.objects import Profile, shown_as
from autopar.errors import UsageError
from autopar.formats import profile as profiles
from autopar.formats.document import read_text

if TYPE_CHECKING:
    from autopar.interop.target import DictatedStages


def import_layout(
    text: str, profile: profiles.Profile | str | Path, *, replicas: int = 1, pipeline_size: int | None = None
) -> DictatedStages:
    """Return the stages that a layout of Megatron's means of a profile's layers; its ``options`` are the planner's.

    Args:
        text: the layout, such as ``"Et*7|t*9L"``.
        profile: of the model.
        replicas: pipelines beside each other (Megatron's data-parallel size).
        pipeline_size: devices of a pipeline; None: one for every stage.

    Raises:
        UsageError: the text is no layout, or not of so many layers, or the devices do not divide its stages.
        FileError: the profile is missing or malformed.

    >>> found = autopar.import_layout("Ett|ttL", "llama.json", replicas=2)
    >>> found.options
    {'stages': '0-2:2,3-5:2', 'schedule': '1f1b'}
    >>> plan = autopar.plan("llama.json", **found.options)
    """
    from autopar.interop.megatron import import_layout as stages_of

    for name, value in (("replicas", replicas), ("pipeline_size", pipeline_size)):
        if value is not None and value < 1:
            raise UsageError(f"`{name}` must be at least 1, found {value}")
    return stages_of(text, given_profile(profile), replicas, pipeline_size)


def import_torchtitan(
    file: str | Path, profile: profiles.Profile | str | Path, *, replicas: int | None = None
) -> DictatedStages:
    """Return the stages of a torchtitan configuration, of a profile's layers; its ``options`` are the planner's.

    Args:
        file: Python with values that are written out (it is not run), TOML or JSON.
        profile: of the model.
        replicas: pipelines beside each other, where the file has as many as there are ranks for.

    Raises:
        FileError: a file is missing or malformed, or states no stages.
        UsageError: the modules are not those of the profile's layers.

    >>> autopar.import_torchtitan("train.toml", "llama.json").stages
    '0-2:2,3-5:2'
    """
    from autopar.interop.torchtitan import import_torchtitan as stages_of

    return stages_of(read_text(Path(file), "torchtitan"), Path(file), given_profile(profile), replicas)


def import_pipedream(file: str | Path, profiled_batch: int = 1) -> Profile:
    """Return the profile that a text graph of PipeDream and DAPPLE describes.

    Args:
        file: the graph.
        profiled_batch: samples of the mini-batch that was profiled.

    Raises:
        FileError: the file is missing or malformed; names the line.

    >>> profile = autopar.import_pipedream("graph.txt", profiled_batch=64)
    >>> [layer.name for layer in profile.layers]
    ['node2', 'node3']
    """
    from autopar.interop.pipedream import pipedream_profile

    return shown_as(Profile, pipedream_profile(read_text(Path(file), "PipeDream"), Path(file), profiled_batch))


def import_profiles(files: Sequence[str | Path]) -> Profile:
    """Return profiles of one model on several kinds of devices as one.

    Raises:
        FileError: a file is missing or malformed, or they differ in more than their devices; names the JSON path.

    >>> both = autopar.import_profiles(["h100.json", "a100.json"])
    >>> [both.device.name, *(each.device.name for each in both.others)]
    ['H100-SXM', 'A100-80G']
    """
    from autopar.hardware.kinds import NamedProfile, join_profiles

    return shown_as(Profile, join_profiles([NamedProfile(str(file), Profile.load(file)) for file in files]))
