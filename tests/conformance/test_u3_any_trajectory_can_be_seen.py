"""U3: of a run only statistics could be seen, and no trajectory.

``steelyard show RUN ROLLOUT`` prints any one with its tokens, versions, log-probabilities and score.
"""

from pathlib import Path

import pytest

from steelyard.cli.main import main
from steelyard.coordinator import events as e
from steelyard.testing.small_runs import journal_events
from steelyard.traces.sealed import SealedTraces
from steelyard.types import Trace

NUM_ROLLOUTS = 3 * 2 * 2


def show(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def token_rows(text: str) -> list[tuple[int, str, str]]:
    """(id, version, log-probability) of each line that shows a sampled token."""
    rows = [line.split() for line in text.splitlines()]
    return [(int(row[1]), row[3], row[4]) for row in rows if len(row) > 5 and row[0].isdecimal() and row[2] == "+"]


def expected_rows(trace: Trace) -> list[tuple[int, str, str]]:
    (version,) = {span.version for turn in trace.turns for span in turn.version_spans}
    return [
        (token, str(version), f"{logprob:.4f}")
        for turn in trace.turns
        for token, logprob in zip(turn.token_ids, turn.logprobs, strict=True)
    ]


def test_u3_any_rollout_is_shown_with_its_tokens_versions_and_score(
    synchronous_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = journal_events(synchronous_run)
    scores = {event.score.attempt_id: event.score for event in events if isinstance(event, e.Scored)}
    leases = [event for event in events if isinstance(event, e.Leased)]
    traces = SealedTraces(synchronous_run / "traces")
    assert len(leases) == NUM_ROLLOUTS
    for lease in leases:
        trace, digest = traces.read_now(lease.attempt_id)
        text = show(capsys, synchronous_run, lease.rollout_id, "--tokens")
        assert f"rollout {lease.rollout_id} of task " in text
        assert f"attempt 1: {lease.attempt_id}" in text
        assert f"version {lease.policy_version}" in text
        assert digest in text
        score = scores[lease.attempt_id]
        assert f"score {score.value} by {score.verifier_version}: {score.detail}" in text
        assert "trained in step" in text
        assert token_rows(text) == expected_rows(trace)
        assert show(capsys, synchronous_run, lease.attempt_id, "--tokens") == text, "its attempt's id names it too"


def test_u3_the_list_names_every_rollout_and_what_came_of_it(
    synchronous_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = show(capsys, synchronous_run, "--last", "1000")
    for event in journal_events(synchronous_run):
        if isinstance(event, e.Leased):
            (line,) = [line for line in text.splitlines() if line.startswith(event.rollout_id)]
            assert "value 0, trained in step" in line


def test_u3_a_rollout_that_is_not_there_is_bad_input(synchronous_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(synchronous_run), "rol_nobody"]) == 2
    assert "got rol_nobody" in capsys.readouterr().err
