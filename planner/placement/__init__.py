"""Placement: which devices stages may take, and what is near what.

In: a cluster. Out: states of the devices that are left, and the ways in which a stage takes some of them.
Read ``pool.py`` first.
"""
