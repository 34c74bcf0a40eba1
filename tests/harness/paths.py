"""Where tests find the repository's folders."""

from pathlib import Path

HARNESS = Path(__file__).resolve().parent
MODELS = HARNESS / "models"
ROOT = HARNESS.parents[1]
EXAMPLES, BENCHMARKS = ROOT / "examples", ROOT / "benchmarks"
