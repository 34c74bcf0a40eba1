"""Checkpoints: a run's state on disk, in pieces that any plan reads; and its weights, in files that others read, too.

In: a rank's job at the end of a step, and a folder. Out: a set of files there with a manifest, whole or not at all; and
again a job that goes on from it. Read first: ``state.py`` (what is kept of a job), then ``writer.py`` (saves it) and
``training.py`` (goes on). Trained weights are ``saving.py``'s, and their format is in ``weights.py``.
"""
