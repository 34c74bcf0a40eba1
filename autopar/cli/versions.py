"""Versions of autopar and of the libraries that it runs with, without importing them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str:
    """Return the installed version of a package.

    >>> version_of("no such package")
    'that is not installed'
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return "that is not installed"
