"""A stage that three ranks run, whose parameter `w` is cut in any way."""

from hypothesis import strategies as st

from autopar.formats.plan import Plan
from autopar.formats.profile import ParameterCut
from drawn_plans import make
from teams import resized

PARTS = 3


def team_plan(cut: ParameterCut) -> Plan:
    """Return a plan of one stage that three ranks run, with a cut of a parameter."""
    plan = resized(make("gpipe", 1, [(4,)], [1], ()), [PARTS])
    stage = plan.stages[0].model_copy(update={"cuts": (cut,)})
    return plan.model_copy(update={"stages": (stage,)})


def cut_by(holders: list[set[int]], dim: int = 0) -> ParameterCut:
    """Return the cut of a dimension whose indices some parts have each."""
    parts = []
    for part in range(PARTS):
        found: list[tuple[int, int]] = []
        for index, having in enumerate(holders):
            if part in having and found and found[-1][1] == index:
                found[-1] = (found[-1][0], index + 1)
            elif part in having:
                found.append((index, index + 1))
        parts.append(tuple(found))
    return ParameterCut(parameter="w", dim=dim, parts=tuple(parts))


DIVISIONS = st.lists(st.sets(st.integers(0, PARTS - 1), min_size=1), min_size=1, max_size=12)
