"""U2: an unknown configuration key was dropped silently, and the run went on with the default.

It is an error that names the key and the nearest valid one, wherever the key stands.
"""

from pathlib import Path

import pytest

from steelyard.cli.main import main

CASES = [
    ("rolout: {max_turns: 3}", [], "rolout.max_turns is not a configuration key; the nearest is rollout.max_turns"),
    ("", ["rolout.max_turns=3"], "rolout.max_turns is not a configuration key; the nearest is rollout.max_turns"),
    ("rollout: {max_turn: 3}", [], "rollout.max_turn is not a configuration key; the nearest is rollout.max_turns"),
    ("", ["train.lr=0.1"], "train.lr is not a configuration key; the nearest is train.learning_rate"),
    ("", ["max_policy_lag=0"], "max_policy_lag is not a configuration key; the nearest is admission.max_policy_lag"),
    ("environment: {kind: repair, options: {edit_discout: 0.5}}", [], "edit_discout"),
    ("", ["environment.kind=repiar"], "environment.kind"),
]


@pytest.mark.parametrize(("text", "overrides", "message"), CASES)
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_u2_an_unknown_key_is_refused_and_the_nearest_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    overrides: list[str],
    message: str,
    dry: list[str],
) -> None:
    config, run = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(text, encoding="utf-8")
    assert main(["train", str(config), *overrides, f"run.dir={run}", *dry]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("steelyard: ")
    assert message in said.err
    assert not run.exists(), "nothing was started"


def test_u2_an_option_of_the_environment_is_checked_too_and_its_nearest_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("environment: {kind: repair, options: {edit_discout: 0.5}}", encoding="utf-8")
    assert main(["train", str(config), "--dry-run"]) == 2
    assert "environment.options" in (said := capsys.readouterr().err)
    assert "edit_discount" in said
