"""The mismatch of engine and trainer, in words: equal weights, yet other log-probabilities. Pure."""

from collections.abc import Sequence

from steelyard.observe.rows import StepRow
from steelyard.observe.wording import significant


def mismatch_alarm(step: StepRow) -> str | None:
    """A sentence where engine and trainer differ by more than they should; else None."""
    if step.mismatch is None or step.mismatch_bound is None or step.mismatch.abs_p99 <= step.mismatch_bound:
        return None
    size = significant(step.mismatch.abs_p99, 2)
    return (
        f"ALARM step {step.step}: engine {step.engine} and trainer differ by {size} nats at p99, on equal weights; "
        f"inference.mismatch_bound is {significant(step.mismatch_bound, 2)}"
    )


def steps_by_engine(steps: Sequence[StepRow]) -> dict[str, list[StepRow]]:
    """Steps whose mismatch was measured, by kind of engine, in the order of their first appearance."""
    found: dict[str, list[StepRow]] = {}
    for step in steps:
        if step.mismatch is not None:
            found.setdefault(step.engine, []).append(step)
    return found
