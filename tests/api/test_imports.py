"""Files of other systems are read from Python as by the command (tests/cli/test_exchange.py)."""

import autopar
from equal_plans import llama_profile


def test_stages_of_a_layout_are_options_of_the_planner() -> None:
    found = autopar.import_layout("Et*6|t*6L", llama_profile(), replicas=2)
    plan = autopar.plan(llama_profile(), "4xH100", times_of="cpu", **found.options)
    assert [stage.replicas for stage in plan.stages] == [2, 2]
