"""Interop: readers and writers of other systems' files.

In: profiles of PipeDream; out: autopar's own. In: a plan; out: another trainer's configuration. Read
``pipedream.py`` first; ``order.py`` puts the nodes of any graph into the one order that layers have. ``target.py`` has
what all exports share, and there is one file for every trainer.
"""
