"""Profiles as commands read them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.formats.profile import Profile

__all__ = ["connected", "read_profile"]


def read_profile(path: Path) -> Profile:
    """Read a profile to plan for.

    Raises:
        FileError: the file is malformed, or its layers are not those of one model.
    """
    from autopar.formats.profile import Profile

    return connected(Profile.load(path), path)


def connected(profile: Profile, path: Path) -> Profile:
    """Return a profile whose layers are all connected with the last one, which computes the loss.

    Raises:
        FileError: some are not; names them.
    """
    from autopar.errors import FileError

    apart = profile.apart()
    if apart:
        names = ", ".join(apart[:3]) + (f" and {len(apart) - 3} more" if len(apart) > 3 else "")
        raise FileError(
            f"{path}: $.tensors: no tensor connects {names} with the last layer, {profile.layers[-1].name}; list what "
            "layers send each other, or profile models apart"
        )
    return profile
