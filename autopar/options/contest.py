"""ContestOptions: what the user asks of plans that are compared by running them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopar.options.option import Options, again, option
from autopar.options.train import RunOptions

RESULTS = Path("contests")
"""Where `autopar compare` keeps results by default."""
RUNNING = "Comparing by running"


@dataclass(frozen=True)
class ContestOptions(Options):
    """What the user asks of plans that are compared by running them.

    Raises:
        UsageError: a value is out of range.
    """

    steps: int = option(100, "Mini-batches that everyone trains.", RUNNING, least=1)
    seeds: int = option(
        2,
        "Everyone trains so many times, each with another seed of first weights and order of samples.",
        RUNNING,
        least=1,
    )
    loss: float | None = option(
        None, "Order by the time until the loss, in the mean of ten mini-batches, is no more than this.", RUNNING
    )
    on: str | None = option(
        None,
        "Train the plans for this cluster, a file or a name, by processes of this host; how long a mini-batch takes is "
        "simulated: the time to a loss on hardware that you have not.",
        RUNNING,
    )
    double: bool = option(False, "Train in float64, where plans differ by rounding alone that train alike.", RUNNING)
    results: Path | None = option(
        None,
        f"Folder that keeps what every run has measured: who is stopped goes on. The command's default: {RESULTS}.",
        RUNNING,
    )
    timeout_s: float = again(RunOptions, "timeout_s")
