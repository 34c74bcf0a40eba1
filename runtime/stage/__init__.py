"""The layers of one rank, run forward and backward one micro-batch at a time.

In: layers, weights, and how the plan divides, recomputes and compiles them. Out: outputs and gradients.
Read first: ``stage.py``; ``sharded.py`` is the stage whose replicas divide its parameters (ZeRO-1, 2 and 3).
``transforms.py`` has the order in which layers are split, held, normalised, compiled and sharded before they run.
"""
