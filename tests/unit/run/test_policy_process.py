"""Making the data of the quick policy: in parts, without torch, and the same every time."""

import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.environments.repair.demonstrations import Mixture
from steelyard.run.policy import EXERCISE_FRAC, BuildRequest
from steelyard.run.policy_process import build, sequences_of_part
from steelyard.trainer.quick_recipe import QuickPolicyRecipe, WarmUpProgress

RECIPE = QuickPolicyRecipe(
    vocab_size=320,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=1,
    head_dim=16,
    num_steps=4,
    num_threads=1,
)


def request_for(directory: Path) -> BuildRequest:
    directory.mkdir()
    return BuildRequest(
        directory=str(directory), recipe=RECIPE, mixture=Mixture(), exercise_frac=EXERCISE_FRAC, max_turns=6
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[BuildRequest, list[WarmUpProgress], int]:
    request = request_for(tmp_path_factory.mktemp("policies") / "one")
    seen: list[WarmUpProgress] = []
    report = build(request, seen.append)
    return request, seen, report.num_steps


def test_a_policy_is_built_from_nothing(built: tuple[BuildRequest, list[WarmUpProgress], int]) -> None:
    request, seen, num_steps = built
    assert num_steps == RECIPE.num_steps == seen[-1].step
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in Path(request.directory).iterdir()}


def test_parts_are_the_same_every_time_and_unlike_each_other(
    built: tuple[BuildRequest, list[WarmUpProgress], int],
) -> None:
    request, _, _ = built
    first, second = sequences_of_part(request, 0), sequences_of_part(request, 1)
    assert first == sequences_of_part(request, 0)
    assert not any(one == other for one, other in zip(first, second, strict=False))


def test_both_parts_together_hold_the_tokens_of_the_whole_warm_up_in_the_asked_shares(
    built: tuple[BuildRequest, list[WarmUpProgress], int],
) -> None:
    request, _, _ = built
    lengths = [len(one.token_ids) for part in (0, 1) for one in sequences_of_part(request, part)]
    wanted = RECIPE.num_steps * RECIPE.batch_tokens
    assert wanted <= sum(lengths) < wanted + 4 * max(lengths)


def test_importing_the_module_that_makes_parts_loads_no_torch() -> None:
    code = "import sys, steelyard.run.policy_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
