"""Events: what happens to a script's job, and the functions of the script that are told of it.

They are told between the job's own methods, and may call these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from autopar.errors import UsageError

Event = Literal["step", "evaluation", "checkpoint"]


class Listeners:
    """Functions by event; what they are to be told waits until it is delivered."""

    def __init__(self) -> None:
        self._calls: dict[Event, list[Callable[..., object]]] = {event: [] for event in get_args(Event)}
        self._waiting: deque[Callable[[], object]] = deque()

    def add(self, event: Event, call: Callable[..., object]) -> None:
        """Have a function told of an event from now on.

        Raises:
            UsageError: there is no such event.
        """
        if event not in self._calls:
            raise UsageError(f"there is no event {event!r}; events are {', '.join(self._calls)}")
        self._calls[event].append(call)

    def queue(self, event: Event, *what: object) -> None:
        """Have those told later that are there now."""
        self._waiting += (partial(call, *what) for call in self._calls[event])

    def deliver(self) -> None:
        """Tell what waits."""
        while self._waiting:
            self._waiting.popleft()()
