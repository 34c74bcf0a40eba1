"""Simulator: interprets a program with durations; one that is exact for all, and a quicker one where they agree.

In: a candidate and its durations. Out: the seconds of a step, or all of its events. Read ``simulate.py`` first;
``contention.py`` is for shared links, ``rows.py`` is what both read.
"""
