"""Planner: profile, cluster and options become a plan. Pure: no torch, no clock, no files."""

if __name__ != "autopar.planner":
    raise ImportError("import this package as autopar.planner; planner/ on its own is not a package")

from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan, simulate

__all__ = ["PlanOptions", "plan", "simulate"]
