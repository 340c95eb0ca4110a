"""Rows of a plausible run, small and seeded: success rises and flattens, lengths are long-tailed, one step is late."""

import math
import random
from collections.abc import Sequence

from steelyard.observe.rows import (
    AnyRow,
    BooksRow,
    EngineRow,
    EnvironmentRow,
    EvaluationLabel,
    EvaluationMode,
    EvaluationRow,
    EvaluationSplit,
    PromptBook,
    StageName,
    StageRow,
    StepRow,
    TokenBook,
)
from steelyard.types import LogRatios

START_S = 1_790_000_000.0
"""When sample runs start, in seconds since the Unix epoch."""

_GROUP_SIZE = 8
_NUM_GROUPS = 24


def make_step(step: int = 0, *, at_s: float = START_S, max_steps: int = 60, seed: int = 0) -> StepRow:
    """Step ``step`` of a run of ``max_steps``; the same arguments give the same row."""
    rng = random.Random(f"{seed}-{step}")
    risen = 1 - math.exp(-3.2 * step / max(1, max_steps))
    success = min(1.0, max(0.0, 0.37 + 0.5 * risen + rng.gauss(0, 0.03)))
    useful = rng.randint(11, 22)
    train_s, wait_s = 2.6 + rng.gauss(0, 0.1), 4.4 - 1.2 * risen + abs(rng.gauss(0, 0.5))
    parts_s = {"assemble": 0.04, "publish": 0.22, "load": 0.19, "checkpoint": 0.35 if (step + 1) % 10 == 0 else 0.0}
    late_s = 6.0 if step == 31 else 0.0
    loss_tokens = int(192 * (95 - 30 * risen) + rng.gauss(0, 200))
    return StepRow(
        at_s=at_s,
        step=step,
        version=step + 1,
        max_steps=max_steps,
        loss=rng.gauss(-0.01, 0.02),
        grad_norm=0.9 - 0.4 * risen + abs(rng.gauss(0, 0.12)),
        kl=abs(rng.gauss(0.0008, 0.0006)),
        ratio_mean=1 + rng.gauss(0, 0.0015),
        ratio_max=1.2 + abs(rng.gauss(0, 0.5)),
        clip_frac=abs(rng.gauss(0.004, 0.003)),
        entropy=0.62 - 0.35 * risen + rng.gauss(0, 0.01),
        learning_rate=3e-4,
        num_tokens=loss_tokens * 4,
        num_loss_tokens=loss_tokens,
        num_trajectories=_GROUP_SIZE * _NUM_GROUPS,
        num_groups=_NUM_GROUPS,
        num_useful_groups=useful,
        num_no_signal=_NUM_GROUPS - useful,
        reward_mean=success * 0.9 + 0.05,
        success_frac=success,
        first_try_frac=success * (0.55 + 0.3 * risen),
        lag_mean=0.0 if step == 0 else 0.55 + rng.uniform(-0.2, 0.3),
        lag_max=min(1, step),
        age_mean_s=6.0 + rng.random(),
        turns_mean=3.6 - 0.9 * risen,
        tokens_p50=88 - 25 * risen + rng.gauss(0, 2),
        tokens_p99=330 - 60 * risen + rng.gauss(0, 15),
        tokens_max=430 + rng.randint(0, 140),
        wait_s=wait_s + late_s,
        assemble_s=parts_s["assemble"],
        train_s=train_s,
        publish_s=parts_s["publish"],
        load_s=parts_s["load"],
        checkpoint_s=parts_s["checkpoint"],
        wall_s=wait_s + late_s + train_s + sum(parts_s.values()) + 0.12,
        engine="local",
        mismatch=make_log_ratios(rng, loss_tokens // 2, 4e-6),
        policy_change=make_log_ratios(rng, loss_tokens - loss_tokens // 2, 0.02) if step else None,
        mismatch_bound=1e-3,
    )


def make_log_ratios(rng: random.Random, num_tokens: int, size: float) -> LogRatios:
    """Figures of a plausible shape whose median is about ``size`` nats."""
    size *= 1 + 0.2 * rng.random()
    return LogRatios(
        num_tokens=num_tokens,
        abs_p01=size / 60,
        abs_p50=size,
        abs_p99=5 * size,
        abs_max=9 * size,
        kl_k1=rng.gauss(0, size / 50),
        kl_k3=size * size,
    )


def make_engine(replica_id: str = "rep_a", *, at_s: float = START_S, seed: int = 0) -> EngineRow:
    """One replica over one second."""
    rng = random.Random(f"{seed}-{replica_id}-{at_s}")
    return EngineRow(
        at_s=at_s,
        replica_id=replica_id,
        decode_tokens_per_s=max(0.0, rng.gauss(4300, 350)),
        prefill_tokens_per_s=max(0.0, rng.gauss(9800, 1500)),
        cached_frac=0.71 + rng.uniform(-0.05, 0.05),
        num_running=rng.randint(40, 64),
        num_waiting=rng.randint(0, 12),
        kv_in_use_frac=0.33 + rng.uniform(-0.08, 0.08),
        busy_frac=0.92 + rng.uniform(-0.08, 0.08),
    )


def make_environment(*, at_s: float = START_S, seed: int = 0) -> EnvironmentRow:
    """Tools and sandboxes over one interval."""
    rng = random.Random(f"{seed}-environment-{at_s}")
    return EnvironmentRow(
        at_s=at_s,
        tool_p50_ms=3.1 + rng.random(),
        tool_p99_ms=11 + 6 * rng.random(),
        sandbox_start_p50_ms=24 + 4 * rng.random(),
        failure_frac=0.0,
        timeout_frac=0.004 * rng.random(),
    )


def make_books(num_steps: int = 60, *, at_s: float = START_S, tokens_missing: int = 0) -> BooksRow:
    """Books after ``num_steps`` steps; they close unless ``tokens_missing`` tokens went astray."""
    prompts = PromptBook(
        issued=num_steps * _NUM_GROUPS + 26, trained=num_steps * _NUM_GROUPS, dropped={"incomplete": 2}, live=24
    )
    trained, evaluated, in_flight = num_steps * 14_800, 233_871, 21_904
    rejected, lost = {"stale": 1_204, "ratio": 318}, {"lease_expired": 977}
    recorded = trained + evaluated + in_flight + sum(rejected.values()) + sum(lost.values()) + tokens_missing
    tokens = TokenBook(
        recorded=recorded, trained=trained, evaluated=evaluated, rejected=rejected, in_flight=in_flight, lost=lost
    )
    return BooksRow(at_s=at_s, prompts=prompts, tokens=tokens, refused={"late": 3, "double": 1})


def make_evaluation(
    label: EvaluationLabel = EvaluationLabel.AFTER,
    mode: EvaluationMode = EvaluationMode.SAMPLED,
    split: EvaluationSplit = EvaluationSplit.HELDOUT,
    *,
    at_s: float = START_S,
    num_tasks: int = 400,
    success_frac: float = 0.82,
) -> EvaluationRow:
    """One evaluation; its failures are spread over four causes, whole numbers that add up."""
    num_success = round(num_tasks * success_frac)
    num_failed = num_tasks - num_success
    valid = round(num_tasks * (0.72 if label is EvaluationLabel.BEFORE else 0.95))
    shares = {"wrong_text": 0.4, "wrong_line": 0.3, "bad_call": 0.2}
    causes = {cause: int(num_failed * part) for cause, part in shares.items()}
    causes["no_submit"] = num_failed - sum(causes.values())
    return EvaluationRow(
        at_s=at_s,
        label=label,
        mode=mode,
        split=split,
        num_tasks=num_tasks,
        num_success=num_success,
        num_all_calls_valid=max(valid, num_success),
        num_success_all_calls_valid=round(num_success * 0.93),
        causes=causes,
        mean_turns=3.4,
        mean_tokens=97.0,
    )


_EVALUATIONS: tuple[tuple[EvaluationMode, EvaluationSplit, int, float, float], ...] = (
    (EvaluationMode.SAMPLED, EvaluationSplit.HELDOUT, 400, 0.3675, 0.8225),
    (EvaluationMode.GREEDY, EvaluationSplit.HELDOUT, 400, 0.405, 0.845),
    (EvaluationMode.SAMPLED, EvaluationSplit.UNSEEN_TEMPLATES, 100, 0.29, 0.61),
    (EvaluationMode.GREEDY, EvaluationSplit.UNSEEN_TEMPLATES, 100, 0.31, 0.66),
)


def make_evaluations(label: EvaluationLabel, *, at_s: float = START_S) -> list[EvaluationRow]:
    """Both modes on both splits, four seconds apart."""
    is_before = label is EvaluationLabel.BEFORE
    return [
        make_evaluation(
            label,
            mode,
            split,
            at_s=at_s + 4 * number,
            num_tasks=num_tasks,
            success_frac=before if is_before else after,
        )
        for number, (mode, split, num_tasks, before, after) in enumerate(_EVALUATIONS, start=1)
    ]


def sample_run(
    *, num_steps: int = 60, max_steps: int = 60, replicas: Sequence[str] = ("rep_a",), seed: int = 0
) -> list[AnyRow]:
    """A whole run: stages, evaluation before, steps with engine rows between them, evaluation after, books.

    With ``num_steps`` below ``max_steps`` it ends after that step, as a killed run does.
    """
    rows: list[AnyRow] = [
        StageRow(at_s=START_S, name=StageName.PREPARE_POLICY, detail="from the cache"),
        StageRow(at_s=START_S + 1, name=StageName.START, detail="1 replica, 1 trainer, 1 scorer"),
        StageRow(at_s=START_S + 9, name=StageName.EVALUATE, detail="before, on version 0"),
        *make_evaluations(EvaluationLabel.BEFORE, at_s=START_S + 9),
        StageRow(at_s=START_S + 25, name=StageName.TRAIN),
    ]
    at_s = START_S + 25
    for step in range(num_steps):
        row = make_step(step, max_steps=max_steps, seed=seed)
        for tick in range(1, int(row.wall_s), 2):
            rows += [make_engine(replica, at_s=at_s + tick, seed=seed) for replica in replicas]
        at_s += row.wall_s
        rows += [make_environment(at_s=at_s, seed=seed), make_step(step, at_s=at_s, max_steps=max_steps, seed=seed)]
    rows.append(make_books(num_steps, at_s=at_s))
    if num_steps < max_steps:
        return rows
    return [
        *rows,
        StageRow(at_s=at_s, name=StageName.EVALUATE, detail=f"after, on version {num_steps}"),
        *make_evaluations(EvaluationLabel.AFTER, at_s=at_s),
        StageRow(at_s=at_s + 17, name=StageName.REPORT),
        make_books(num_steps, at_s=at_s + 18),
        StageRow(at_s=at_s + 18, name=StageName.DONE),
    ]
