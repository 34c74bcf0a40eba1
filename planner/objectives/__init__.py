"""Objectives: what may be asked of a plan besides the least seconds per step.

``cost`` asks for the cheapest training and ``throughput`` for the quickest asynchronous pipeline.
"""
