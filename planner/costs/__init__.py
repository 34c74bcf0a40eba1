"""Costs: the one cost model; what a stage takes, sends and holds."""
