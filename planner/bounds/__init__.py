"""Bounds: seconds that no schedule of some stages can undercut.

In: stages with their seconds. Out: a lower bound of the step, and which of its terms bind.
Read ``chain.py`` first: its docstring is the recursion.
"""
