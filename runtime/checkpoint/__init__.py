"""Checkpoints: a run's state on disk, in pieces that any plan reads.

In: a rank's job at the end of a step, and a folder. Out: a set of files there with a manifest, whole or not at all; and
again a job that goes on from it. Read first: ``state.py`` (what is kept of a job), then ``writer.py`` (saves it) and
``training.py`` (goes on).
"""
