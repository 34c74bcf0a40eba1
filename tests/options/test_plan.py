"""Options that contradict each other, and those that an objective does not know, are refused by name."""

import re
from dataclasses import replace
from typing import get_args

import pytest

from autopar.errors import UsageError
from autopar.options.plan import Objective, PlanOptions, admissible_options, check_flags
from random_problems import gpt_profile

ASKED: dict[str, object] = {"gpus": 2, "bytes_per_s": 1e9, "gap": 0.1, "seed": 3, "batch": 8, "memory_bytes": 2**30}
ASKED |= {"use_all": True, "divisible": True, "recompute": "full", "schedule": "gpipe", "micro_batches": 4}
ASKED |= {"min_stages": 2, "max_stages": 3, "forbid_cut": ("0",), "pin": ("0 on test",), "shard": "none"}
ASKED |= {"stages": "0-13:1", "effort": 2, "exact": True, "equal_widths": True, "solver": "milp"}
ASKED |= {"solver_seconds": 5.0, "deadline_s": 1.0}
"""One value of each that is not the usual one."""
NOT_STEP = ["deadline_s"]
NOT_COST = ["stages", "effort", "exact", "equal_widths", "solver", "solver_seconds"]
NOT_THROUGHPUT = ["divisible", "exact", "equal_widths", "solver", "solver_seconds", "deadline_s"]


@pytest.mark.parametrize("objective", get_args(Objective))
def test_an_objective_refuses_exactly_what_it_does_not_know(objective: Objective) -> None:
    check_flags(PlanOptions(objective=objective))
    for name, value in ASKED.items():
        options = PlanOptions(objective=objective, **{name: value})  # type: ignore[arg-type]
        if name not in {"step": NOT_STEP, "cost": NOT_COST, "throughput": NOT_THROUGHPUT}[objective]:
            check_flags(options)
            continue
        with pytest.raises(UsageError, match=f"^`{name}` does not go with `objective='{objective}'`.* `{name}`$"):
            check_flags(options)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"schedule": "1f1b", "chunks": 2}, "`chunks` must be left out but with `schedule='interleaved'`, found 2"),
        ({"schedule": "interleaved", "chunks": 1}, "`chunks` must be at least 2, found 1"),
        ({"schedule": "zb-h1", "solver": "milp"}, "`solver='milp'` knows gpipe and 1f1b only, not zb-h1"),
        ({"schedule": "zb"}, "`schedule` must be one of auto, gpipe, 1f1b, interleaved"),
        ({"objective": "cost", "deadline_s": float("nan")}, "`deadline_s` must be positive seconds"),
        ({"objective": "cost", "deadline_s": 0.0}, "`deadline_s` must be positive seconds"),
        ({"effort": 2, "gap": 0.0}, "`effort` does not go with `gap=0`"),
        ({"effort": 2, "solver": "milp"}, "`effort` does not go with `solver='milp'`"),
        ({"equal_widths": True, "stages": "0-6:1,7-13:1"}, "`equal_widths` does not go with"),
        ({"equal_widths": True, "gap": 0.0}, "`equal_widths` does not go with"),
        ({"equal_widths": True, "solver": "milp"}, "`equal_widths` does not go with"),
        ({"gpus": 2, "min_stages": 3}, "`min_stages=3` needs as many devices, but `gpus` is 2"),
        ({"bytes_per_s": float("nan")}, "`bytes_per_s` must be positive, found nan"),
        ({"seed": 2**63}, "`seed` must be at most 9223372036854775807, found"),
        ({"recompute": "some"}, "`recompute` must be one of auto, none, full; found 'some'"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        PlanOptions(**asked)  # type: ignore[arg-type]


def test_of_sharding_only_what_can_run_is_left() -> None:
    usual, options = gpt_profile(), PlanOptions()
    assert admissible_options(options, usual) is options
    for found, remedy in (({"compiled": True}, "eager layers"), ({"indivisible": "it raises"}, "another optimizer")):
        profile = usual.model_copy(update=found)
        assert admissible_options(options, profile) == replace(options, shard="none")
        with pytest.raises(UsageError, match=f"`shard='optimizer'`.*`shard='none'`, or profile with .*{remedy}"):
            admissible_options(PlanOptions(shard="optimizer"), profile)
