"""What a simulation looked like over its time, in a bounded number of samples."""

from steelyard.types.record import Record

_MOST = 400
_FIRST_INTERVAL_S = 1e-3


class Sample(Record, frozen=True, kw_only=True):
    """One instant. Counts are of that instant; sums run from the start.

    Attributes:
        step: optimizer steps done.
        rollout: devices in the role, those that drain included; ``moving`` are on their way between roles.
        num_live: attempts that are under way, tools included.
        rollout_queue: of those, calls that wait for a place on a replica.
        train_backlog: trajectories of complete groups that no step has consumed.
        reward_queue: trajectories that wait for their score.
        rollout_busy_s: device-seconds spent on sampling so far; ``reward_busy_s`` on scoring.
        generated_tokens: sampled so far.
    """

    at_s: float
    step: int
    rollout: int
    train: int
    reward: int
    moving: int
    num_live: int
    rollout_queue: int
    train_backlog: int
    reward_queue: int
    rollout_busy_s: float
    reward_busy_s: float
    generated_tokens: int


class Timeline:
    """Samples at a distance that doubles whenever there would be too many: memory does not grow with the run."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._interval_s = _FIRST_INTERVAL_S
        self.due_at_s = 0.0

    @property
    def samples(self) -> tuple[Sample, ...]:
        """In order of time."""
        return tuple(self._samples)

    def add(self, sample: Sample) -> None:
        """Keep one; the next is due an interval later."""
        self._samples.append(sample)
        if len(self._samples) > _MOST:
            self._samples = self._samples[::2]
            self._interval_s = max(2.0 * self._interval_s, self._samples[-1].at_s / _MOST)
        self.due_at_s = sample.at_s + self._interval_s
