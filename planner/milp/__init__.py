"""MILP: the search's question as a mixed-integer linear program.

In: the families that options admit. Out: the best plan that a solver finds, and a proof. ``program.py`` states the
program as data, ``solve.py`` has it solved through PuLP, and takes no solver at its word.
"""
