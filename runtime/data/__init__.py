"""Samples of a mini-batch, as a rank's share of every micro-batch.

In: a dataset and a plan. Out: one mini-batch after the other, on the rank's device.
Read first: ``loader.py``.
"""
