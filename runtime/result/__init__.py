"""What a rank brings back: times, memory and weights.

In: the records of steps. Out: a report, a timeline, and weights in files.
Read first: ``outcome.py``.
"""
