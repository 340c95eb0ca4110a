"""The quick policy: learns, is a standard directory, and comes out the same twice."""

import json
import random
from pathlib import Path

import msgspec
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InputError
from steelyard.testing.tokenizer import chatml_hermes_template
from steelyard.trainer.model import load_model
from steelyard.trainer.model_files import check_model_dir
from steelyard.trainer.quick_policy import (
    cut_batches,
    make_batch,
    new_quick_module,
    schedule_frac,
    warm_up,
    warm_up_rate,
)
from steelyard.trainer.quick_recipe import (
    CALL_TOKENS,
    CONTROL_TOKENS,
    QuickPolicyRecipe,
    TokenSequence,
    WarmUpProgress,
    cache_key,
    source_digest,
    write_quick_tokenizer,
)

TEXTS = ["def f(a, b):\n    return a - b\n", '{"name": "submit", "arguments": {}}', "3 of 4 fail: f(12) = 12"] * 5
RECIPE = QuickPolicyRecipe(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    num_steps=40,
    batch_tokens=256,
    learning_rate=1e-2,
    num_threads=1,
)


def counting_sequences(count: int) -> list[TokenSequence]:
    """A random start, then each token one more than the last; the first two are context."""
    rng = random.Random(0)
    sequences = []
    for _ in range(count):
        start, length = rng.randrange(40), rng.randint(4, 12)
        ids = tuple(3 + (start + i) % 40 for i in range(length))
        sequences.append(TokenSequence(token_ids=ids, loss_mask=(0, 0) + (1,) * (length - 2)))
    return sequences


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "policy"
    path.mkdir()
    return path


def test_the_tokenizer_has_its_control_tokens_first_and_encodes_any_text(directory: Path) -> None:
    num_tokens = write_quick_tokenizer(directory, TEXTS, chatml_hermes_template(), 320)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert [tokenizer.token_to_id(text) for text in CONTROL_TOKENS] == [0, 1, 2]
    assert num_tokens <= 320
    for text in ("return a - b", "über 漢字 \x00\U0001f600", "  spaced   out\n\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert [len(tokenizer.encode(text).ids) for text in CALL_TOKENS] == [1, 1]


def test_digits_are_tokens_of_their_own(directory: Path) -> None:
    write_quick_tokenizer(directory, ["1234 1234 1234"] * 20, "", 320)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert len(tokenizer.encode("1234").ids) == 4


def test_the_same_texts_give_the_same_tokenizer(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_quick_tokenizer(tmp_path / name, TEXTS, "template", 320)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_warm_up_learns_and_writes_a_directory_that_loads(directory: Path) -> None:
    num_tokens = write_quick_tokenizer(directory, TEXTS, chatml_hermes_template(), 320)
    seen: list[WarmUpProgress] = []
    report = warm_up(directory, num_tokens, counting_sequences(300), RECIPE, seen.append)
    assert report.last_loss < 0.5 * report.first_loss
    assert report.num_steps == 40
    assert [progress.step for progress in seen] == [10, 20, 30, 40]
    assert check_model_dir(directory).architecture == "LlamaForCausalLM"
    module = load_model(directory)
    assert sum(parameter.numel() for parameter in module.parameters()) == report.num_parameters
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([[10, 11, 12, 13]])).logits
    assert logits[0, -1].argmax() == 14
    generation = json.loads((directory / "generation_config.json").read_bytes())
    assert generation["eos_token_id"] == CONTROL_TOKENS.index("<|im_end|>")


def test_the_same_recipe_gives_the_same_bits(tmp_path: Path) -> None:
    weights = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        warm_up(tmp_path / name, 300, counting_sequences(50), msgspec.structs.replace(RECIPE, num_steps=5))
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_warm_up_without_time_ends_early_and_says_how_early(directory: Path) -> None:
    report = warm_up(directory, 300, counting_sequences(50), msgspec.structs.replace(RECIPE, time_limit_s=0.0))
    assert report.num_steps == 0
    assert (directory / "model.safetensors").is_file()


def test_the_default_recipe_has_one_to_four_million_parameters() -> None:
    module = new_quick_module(QuickPolicyRecipe(), QuickPolicyRecipe().vocab_size)
    assert 1_000_000 <= sum(parameter.numel() for parameter in module.parameters()) <= 4_000_000


def test_the_rate_rises_and_falls_along_a_cosine() -> None:
    recipe = QuickPolicyRecipe(num_steps=100, learning_rate=1.0, warmup_frac=0.1, final_rate_frac=0.2)
    rates = [warm_up_rate(step / 100, recipe) for step in range(101)]
    assert rates[:11] == pytest.approx([(i + 1) / 11 for i in range(11)])
    assert rates[55] == pytest.approx(0.6)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)


def test_the_schedule_follows_the_steps_until_a_late_machine_has_used_half_its_time() -> None:
    recipe = QuickPolicyRecipe(num_steps=100, time_limit_s=50.0)
    assert schedule_frac(10, 24.0, recipe) == 0.1
    assert schedule_frac(60, 26.0, recipe) == 0.6
    assert schedule_frac(10, 30.0, recipe) == 0.6
    assert schedule_frac(10, 60.0, recipe) == 1.0


def test_a_batch_predicts_the_masked_tokens_and_weighs_context() -> None:
    rows = [
        TokenSequence(token_ids=(5, 6, 7), loss_mask=(1, 0, 1)),
        TokenSequence(token_ids=(8, 9), loss_mask=(0, 1)),
    ]
    batch = make_batch(rows, context_weight=0.0)
    assert batch.token_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert (batch.positions.tolist(), batch.targets.tolist()) == ([1, 3], [7, 9])
    assert batch.num_tokens == 5
    with_context = make_batch(rows, context_weight=0.5)
    assert with_context.targets.tolist() == [6, 7, 9]
    assert with_context.weights.tolist() == [0.5, 1.0, 1.0]


@given(st.lists(st.integers(1, 50), max_size=30).map(lambda v: sorted(v, reverse=True)), st.integers(50, 300))
def test_batches_cover_all_rows_within_the_budget(lengths: list[int], budget: int) -> None:
    runs = cut_batches(lengths, budget)
    assert [i for start, stop in runs for i in range(start, stop)] == list(range(len(lengths)))
    assert all((stop - start) * lengths[start] <= budget for start, stop in runs)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "at least one sequence"),
        ([TokenSequence(token_ids=(1, 2), loss_mask=(1, 0))], "at least one sequence"),
        ([TokenSequence(token_ids=(1,) * 257, loss_mask=(1,) * 257)], "at most 256 tokens, got 257"),
    ],
)
def test_sequences_that_cannot_be_trained_on_are_refused(
    directory: Path, sequences: list[TokenSequence], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        warm_up(directory, 300, sequences, RECIPE)


def test_the_cache_key_changes_with_every_part() -> None:
    base = cache_key(RECIPE, {"template": "a"})
    assert base == cache_key(RECIPE, {"template": "a"})
    assert base != cache_key(RECIPE, {"template": "b"})
    assert base != cache_key(msgspec.structs.replace(RECIPE, seed=1), {"template": "a"})


def test_a_source_digest_changes_with_any_file_below(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "one.py").write_text("a = 1")
    (tmp_path / "sub" / "two.jinja").write_text("b")
    before = source_digest([tmp_path])
    (tmp_path / "notes.txt").write_text("not code")
    assert source_digest([tmp_path]) == before
    (tmp_path / "sub" / "two.jinja").write_text("c")
    assert source_digest([tmp_path]) != before
    assert source_digest([tmp_path / "one.py"]) != source_digest([tmp_path])


def test_torch_is_left_with_the_threads_that_the_recipe_names(directory: Path) -> None:
    warm_up(directory, 300, counting_sequences(10), msgspec.structs.replace(RECIPE, num_steps=1))
    assert torch.get_num_threads() == 1
