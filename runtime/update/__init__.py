"""The optimizer's step on every rank, as plain training would make it.

In: gradients and the user's optimizer, scheduler and clipping. Out: new parameters, alike on all replicas.
Read first: ``update.py``.
"""
