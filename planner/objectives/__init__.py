"""Objectives: what may be asked of a plan besides the least seconds per step.

``cost`` asks for the cheapest training and ``throughput`` for the quickest asynchronous pipeline, both by autopar's own
cost model. ``pipedream`` and ``piper`` are those planners' own objectives, by their formulas.
"""
