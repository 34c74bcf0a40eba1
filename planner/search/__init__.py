"""Search: the best plan of what the options allow, and a lower bound of all.

In: cost model and simulator. Out: the fastest plan found, those met beside it, and the bound. ``best_first.py`` has the
order: tables of bounds (``tables.py``) first, plans that keep a pace (``pace.py``), candidates by their bounds, and the
simulator last; then ``local.py`` moves on from several of the best. Read it first.
"""
