"""Planner: profile, cluster and options become a plan. Pure: no torch, no clock, no files.

``plan.py`` asks the rooms in turn: ``costs`` prices, ``pool`` says which devices are left, ``placement`` where stages
stand, ``bounds`` what no schedule undercuts, ``simulator`` judges, ``search`` and ``milp`` find, ``peers`` propose.
Read ``plan.py`` first.
"""

if __name__ != "autopar.planner":
    raise ImportError("import this package as autopar.planner; planner/ on its own is not a package")

from autopar.options.plan import PlanOptions
from autopar.planner.assemble import action_prices, reprice, simulate
from autopar.planner.held import held_bytes
from autopar.planner.plan import plan

__all__ = ["PlanOptions", "action_prices", "held_bytes", "plan", "reprice", "simulate"]
