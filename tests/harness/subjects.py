"""The captured model of the tests of estimates: capturing it takes longer than they do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from autopar.capture import load
from autopar.profiler.subject import ProfileOptions, Subject, prepare
from paths import EXAMPLES


@cache
def gpt_subject() -> Subject:
    """Return the example's GPT, to be computed in bf16; nothing may move or train it."""
    return replace(prepare(load(str(EXAMPLES / "gpt.py")), ProfileOptions(batch=4)), precision="bf16")
