"""Policy: a rule of which weights forwards and backwards see; and StageDepths, all that it knows of a stage."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple


class UpdatesAhead(NamedTuple):
    """How many updates ahead weights are predicted; 0: the newest are seen."""

    forward: int
    backward: int


class StageDepths(NamedTuple):
    """How deep a stage of a pipeline that is never flushed is."""

    depth: int
    """Its micro-batches in flight, K_s."""
    first_depth: int
    """The first stage's, K_0."""
    micro_batches: int
    """Of a mini-batch, T: there is an update for every T of them."""
    lag: int = 0
    """Micro-batches whose backwards come between a mini-batch's last one and its update."""
    ahead: UpdatesAhead | None = None
    """Of ``predict``: how far predictions are ahead; None: as far as is counted."""

    @property
    def gradients(self) -> int:
        """Of how many mini-batches gradients are kept at a time."""
        return 1 - (-self.lag // self.micro_batches)

    def newest_at_forward(self, micro_batch: int) -> int:
        """Return how many updates there have been when the forward of a micro-batch comes; below 0 stands for 0.

        It comes behind the backward of ``depth`` micro-batches before.
        """
        return (micro_batch - self.depth - self.lag + 1) // self.micro_batches

    def newest_at_backward(self, micro_batch: int) -> int:
        """Return how many there have been when its backward comes: without a lag, those of the mini-batches before."""
        return (micro_batch - self.lag) // self.micro_batches


class Policy:
    """A weight policy; by itself, all see the newest weights, and nothing more is kept.

    Micro-batches are counted through all mini-batches from the last drain on, and versions by their updates.
    """

    prepares: ClassVar[Literal["", "predict", "correct"]] = ""
    """What it makes of the newest weights, for forwards, backwards or both to see; or nothing."""
    sums_gradients: ClassVar[bool] = False
    """Whether updates come so late that all ranks can add up what they know of a mini-batch's gradients before."""
    shares_parameters: ClassVar[bool] = True
    """Whether stages that share a parameter update it alike."""
    takes_turns: ClassVar[bool] = False
    """Whether replicas may take whole mini-batches in turn; each then counts its own micro-batches."""

    def forward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """Return the version that the forward of a micro-batch sees; below 0 stands for 0."""
        return stage.newest_at_forward(micro_batch)

    def backward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """Return the version that its backward sees."""
        return stage.newest_at_backward(micro_batch)

    def least_micro_batches(self, first_depth: int) -> int:
        """Return the fewest micro-batches of a mini-batch with which the rule holds."""
        return 1

    def lag(self, stage: StageDepths) -> int:
        """Return how many micro-batches later than it could be an update is; ``stage`` has none yet."""
        return 0

    def prepares_forwards(self, stage: StageDepths) -> bool:
        """Whether forwards see weights that are no version; made before the first forward of a mini-batch."""
        return False

    def prepares_backwards(self, stage: StageDepths) -> bool:
        """Whether backwards do; made behind an update, until the next one."""
        return False

    def buffers(self, stage: StageDepths) -> int:
        """Return how often a stage keeps as much as its weights, beside their versions."""
        return 0


class OneVersion(Policy):
    """Backwards see what their forwards have seen."""

    def backward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """See :class:`Policy`."""
        return self.forward_version(stage, micro_batch)
