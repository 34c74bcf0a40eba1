"""Whatever a file holds, its reader gives an object or one clean line: some cases of benchmarks/broken_files.py."""

import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import broken_files
from readers.files import READERS, good_files
from readers.mutate import broken

CASES = 30
good = cache(good_files)


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", range(7))
def test_broken_files_give_an_object_or_one_clean_line(seed: int, tmp_path: Path) -> None:
    outcomes, bad = Counter[str](), []
    for kind in READERS:
        assert broken_files._read(kind, good()[kind], tmp_path) == ("object", "")
        for case in range(CASES):
            content = broken(random.Random(f"{seed}/{case}"), good()[kind])
            outcome, said = broken_files._read(kind, content, tmp_path)
            outcomes[outcome] += 1
            bad += [(kind, case, said)] if outcome == "bad" else []
    assert bad == []
    assert min(outcomes["object"], outcomes["refused"]) > len(READERS)
