"""A policy from outside Steelyard: it moves a replica's devices only where the same stage was behind several times."""

from steelyard.allocation.snapshot import Plan, Role, Snapshot, predicted_period_s
from steelyard.errors import InputError


class PatientPolicy:
    """Moves towards the stage that was the slower one after each of the last ``patience_steps`` optimizer steps.

    What it keeps between calls depends on earlier snapshots only, so the same run gives the same decisions.

    Args:
        patience_steps: steps in a row for which a move must have promised a gain.
        least_gain_frac: the gain that counts, as a share of the time of a step.
    """

    def __init__(self, patience_steps: int = 3, least_gain_frac: float = 0.02) -> None:
        if patience_steps < 1:
            raise InputError(f"patience_steps must be >= 1, got {patience_steps}")
        if not 0.0 <= least_gain_frac < 1.0:
            raise InputError(f"least_gain_frac must be from 0 to below 1, got {least_gain_frac}")
        self._patience_steps = patience_steps
        self._least_gain_frac = least_gain_frac
        self._wanted: Role | None = None
        self._num_in_a_row = 0

    def decide(self, snapshot: Snapshot) -> Plan:
        """The split to have from now on, within ``snapshot.limits``."""
        split = snapshot.split
        target, gain_frac = self._best_move(snapshot)
        self._num_in_a_row = self._num_in_a_row + 1 if target is self._wanted else 1
        self._wanted = target
        if target is None:
            return Plan(split=split, reason="no move promises enough")
        if self._num_in_a_row < self._patience_steps or snapshot.is_moving:
            return Plan(split=split, reason=f"{target} is behind for {self._num_in_a_row} steps", is_due=False)
        self._num_in_a_row = 0
        source = Role.TRAIN if target is Role.ROLLOUT else Role.ROLLOUT
        wanted = split.moved(source, target, split.rollout_tp)
        return Plan(split=wanted, reason=f"{target} was behind for {self._patience_steps} steps", gain_frac=gain_frac)

    def _best_move(self, snapshot: Snapshot) -> tuple[Role | None, float]:
        """The role that should have one more replica's devices, and the share of a step's time that this saves."""
        now_s = predicted_period_s(snapshot.split, snapshot)
        best: tuple[Role | None, float] = (None, self._least_gain_frac)
        if now_s is None or now_s == 0.0:
            return best
        for source, target in ((Role.TRAIN, Role.ROLLOUT), (Role.ROLLOUT, Role.TRAIN)):
            wanted = snapshot.split.moved(source, target, snapshot.split.rollout_tp)
            after_s = predicted_period_s(wanted, snapshot)
            if after_s is None or snapshot.limits.broken_by(wanted) is not None:
                continue
            if 1.0 - after_s / now_s > best[1]:
                best = (target, 1.0 - after_s / now_s)
        return best
