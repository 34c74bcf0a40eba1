"""Gradients and losses, summed over micro-batches and replicas.

In: what backwards leave in the parameters. Out: gradients that all replicas of a stage share, and the loss.
Read first: ``reducer.py``.
"""
