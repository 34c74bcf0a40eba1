"""Interpret: the loop that performs a rank's program on a machine, which says what becomes of every action.

The machines are the executor (:mod:`.execute`), which trains, and evaluation (:mod:`.start.evaluate`), which has
forwards alone. Rehearsals give the executor layers that compute nothing: in virtual time those that take a profile's
seconds, to count memory those of tensors without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from autopar.errors import AutoparError, TrainingError, cause_of
from autopar.formats.plan import Plan
from autopar.formats.program import Action
from autopar.ranks.failure import NonFiniteError, PeerLostError, is_of_connection
from autopar.runtime.device import is_out_of_memory, out_of_memory
from autopar.schedules.repetition import Repetition


class Machine(Protocol):
    """What performs a rank's actions."""

    actions: list[Action]
    """Of its program."""
    acts: list[Callable[[], None]]
    """By position, what performs an action."""

    def absent(self, repetition: Repetition) -> frozenset[int]:
        """Return the positions of actions of mini-batches that there are none of."""

    def post(self, position: int) -> None:
        """Post the receives that are due before an action."""

    def note(self, position: int) -> None:
        """Say that an action is about to be performed."""

    def mark(self) -> object:
        """Mark the present moment."""

    def error_at(self, error: Exception, action: Action) -> AutoparError:
        """Say of an error where it happened."""


def interpret(machine: Machine, repetition: Repetition) -> list[object]:
    """Perform a repetition of a program; return a mark of the beginning, and of the end of each action.

    Raises:
        AutoparError: an action failed; names it.
    """
    absent, marks = machine.absent(repetition), [machine.mark()]
    for position, act in enumerate(machine.acts):
        try:
            machine.post(position)
            if position not in absent:
                machine.note(position)
                act()
        except Exception as error:
            raise machine.error_at(error, machine.actions[position]) from error
        marks.append(machine.mark())
    return marks


def located_error(
    error: Exception, place: str, plan: Plan, actions: Sequence[Action], device: torch.device
) -> AutoparError:
    """Return an error of an action with its place, and with what is known of what fails like this."""
    if isinstance(error, NonFiniteError):
        return error.at(place)
    if isinstance(error, AutoparError):
        return type(error)(f"{place}: {error}")
    if is_out_of_memory(error):
        return out_of_memory(place, error, plan, {each.stage for each in actions}, device)
    kind = PeerLostError if is_of_connection(error) else TrainingError
    return kind(f"{place}: {cause_of(error)}")
