"""Search: the best plan of what the options allow, and a lower bound of all; tables, bounds first, simulation last."""
