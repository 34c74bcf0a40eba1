"""Interop: readers of other systems' files."""
