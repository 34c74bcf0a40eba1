"""Failures of ranks: causes are told from consequences, and cross to another process as what they were."""

import json

import pytest
import torch
import torch.distributed as dist

from autopar.errors import AutoparError, CaptureError, FileError, InfeasibleError, TrainingError, UsageError
from autopar.ranks.failure import Failure, PeerLostError, SaidElsewhereError


def caught(error: Exception) -> Failure:
    """Return the failure of an error that was raised, as another process reads it."""
    try:
        raise error
    except Exception as raised:
        return Failure(**json.loads(json.dumps(Failure.of(raised).as_dict())))


@pytest.mark.parametrize(
    ("error", "kind", "consequence"),
    [
        (UsageError("too few"), UsageError, False),
        (InfeasibleError("too much"), InfeasibleError, False),
        (FileError("plan.json: no"), FileError, False),
        (CaptureError("m.py: no"), FileError, False),
        (TrainingError("lost"), TrainingError, False),
        (PeerLostError("rank 1 said nothing"), TrainingError, True),
    ],
)
def test_an_error_of_autopar_is_raised_again_of_its_kind_with_its_words_and_its_trace(
    error: AutoparError, kind: type[AutoparError], consequence: bool
) -> None:
    failure = caught(error)
    again = failure.as_error()
    assert (type(again), str(again), again.exit_code) == (kind, str(error), error.exit_code)
    assert (failure.consequence, failure.has_location) == (consequence, True)
    assert "in caught" in "".join(again.__notes__)
    assert str(failure.as_error("rank 3: ")) == f"rank 3: {error}"


@pytest.mark.reliability(9)
def test_an_error_is_one_line_of_the_user_s_code_or_a_consequence_said_once() -> None:
    failure = caught(ValueError("two\n  lines"))
    line = caught.__code__.co_firstlineno + 3
    assert failure.message == f"ValueError: two lines ({__file__}:{line})"
    assert (failure.exit_code, failure.consequence, failure.has_location) == (5, False, False)
    assert failure.trace.endswith("ValueError: two\n  lines\n")
    assert caught(KeyError()).message.startswith("KeyError: no message (")
    with pytest.raises(ValueError, match="process group") as raised:
        dist.all_reduce(torch.ones(1))
    assert Failure.of(raised.value).consequence
    assert not caught(ValueError(str(raised.value))).consequence
    failure = caught(FileError("plan.json: no"))
    errors = [failure.as_common_error(rank) for rank in range(3)]
    assert [type(each) for each in errors] == [FileError, SaidElsewhereError, SaidElsewhereError]
    assert {(str(each), each.exit_code) for each in errors} == {("plan.json: no", 4)}
