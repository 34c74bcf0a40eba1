"""Interop: readers of other systems' files.

In: profiles of PipeDream and Piper, and autopar's own of several kinds of devices. Out: one profile.
Read ``pipedream.py`` first; ``order.py`` puts the nodes of any graph into the one order that layers have.
"""
