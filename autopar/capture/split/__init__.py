"""Tensor parallelism: any captured layer split among the ranks of a team, by what its operators do.

In: a layer, the number of parts, and which part. Out: a layer that computes that part, with the sums among parts, and
which indices of every parameter it has. ``names.py`` says what dimensions are made of; ``rules/`` has a small function
for every operator, which says what it does to names; ``analysis.py`` applies them to a layer; ``choice.py`` chooses the
names that are split, and says what that makes of parameters, for a plan to keep, or why a layer does not split;
``rewrite.py`` makes the part, and says where it sums. Outside regions, the sequence may be split: ``sequence.py``
says which inputs and outputs are in slices, and what is computed so. Read ``analysis.py`` first.

Nothing here looks at the names of modules and parameters, nor at classes: a layer is its operators.
"""
