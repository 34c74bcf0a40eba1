"""Costs: the one cost model; what a stage takes, sends and holds.

In: a profile, a cluster, and options. Out: seconds of forwards, backwards, messages and reductions, and peak bytes.
Read ``model.py`` first; everything else in the planner asks it and nothing else for numbers.
"""
