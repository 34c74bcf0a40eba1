"""Costs: the one cost model; what a stage takes, sends and holds.

In: a profile, a cluster, and options. Out: seconds of forwards, backwards, messages and reductions, and peak bytes.
Read ``model.py`` first; everything else in the planner asks it and nothing else for numbers.
"""

from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any, TypeVar, cast
from weakref import proxy

Method = TypeVar("Method", bound=Callable[..., Any])


def memoize(method: Method) -> Method:
    """Return a method whose results every instance remembers; copies of an instance share what it has begun."""
    return cast(Method, cached_property(lambda instance: cache(partial(method, instance))))


def memoize_weakly(method: Method) -> Method:
    """Return a method like :func:`memoize`, but for an instance that goes, with its results, as soon as nobody has it.

    Large tables would otherwise stay until the collector looks for what is held in circles.
    """
    return cast(Method, cached_property(lambda instance: cache(partial(method, proxy(instance)))))
