"""Every fault and bad input that is promised to be tried has tests that bear its number; no test bears another."""

from reference_pages.faults import CASES, files_of_cases


def test_every_case_has_tests_and_every_mark_a_case() -> None:
    assert list(CASES) == list(range(1, 59))
    assert list(files_of_cases()) == list(CASES)
