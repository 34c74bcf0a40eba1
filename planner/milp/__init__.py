"""MILP: the search's question as a mixed-integer linear program."""
