"""Reproductions: other systems' planners by their own formulas, to hold against what was published of them.

`piper_files.py` and `aceso.py` read Piper's and Aceso's inputs, `pipedream.py` and `piper.py` plan, `plans.py` writes
and prices what they plan as autopar's plans. The peers that `autopar compare` shows are others: they plan by autopar's
costs (`planner/peers/`).
"""
