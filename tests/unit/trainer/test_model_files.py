"""Bad model directories get a clear message, before torch is loaded and after."""

import json
import shutil
from pathlib import Path

import pytest

from steelyard.errors import InputError
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.trainer.model import load_model
from steelyard.trainer.model_files import check_model_dir


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def change_config(model_dir: Path, **changes: object) -> None:
    config = json.loads((model_dir / "config.json").read_bytes())
    (model_dir / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_good_directory_says_what_it_holds(model_dir: Path) -> None:
    files = check_model_dir(model_dir)
    assert files.architecture == "LlamaForCausalLM"
    assert files.num_tokenizer_tokens <= files.vocab_size
    assert files.max_context_tokens == 2048


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (shutil.rmtree, "model.policy: must be a Hugging Face directory, but .* does not exist"),
        (lambda d: (d / "config.json").unlink(), r"must hold config\.json"),
        (lambda d: (d / "tokenizer.json").unlink(), r"must hold tokenizer\.json"),
        (lambda d: (d / "model.safetensors").unlink(), r"must hold the weights as \*\.safetensors"),
        (lambda d: (d / "config.json").write_text("{"), "must be readable JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "must hold a JSON object, got list"),
        (lambda d: change_config(d, vocab_size="x"), "must be an integer, got 'x'"),
        (lambda d: change_config(d, vocab_size=100), "tokenizer and model do not fit.*vocab_size is 100"),
    ],
)
def test_what_is_wrong_with_a_directory_is_named(model_dir: Path, break_it: object, message: str) -> None:
    assert callable(break_it)
    break_it(model_dir)
    with pytest.raises(InputError, match=message):
        check_model_dir(model_dir)


def test_weights_that_do_not_fit_their_config_are_refused(model_dir: Path) -> None:
    change_config(model_dir, num_hidden_layers=3)
    with pytest.raises(InputError, match=r"do not fit its config\.json.*layers\.2"):
        load_model(model_dir)


def test_weights_of_another_shape_are_refused(model_dir: Path) -> None:
    change_config(model_dir, intermediate_size=99)
    with pytest.raises(InputError, match=r"model\.policy"):
        load_model(model_dir)


def test_a_truncated_weights_file_is_refused(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"must load as a decoder"):
        load_model(model_dir)


def test_parameters_lie_in_aligned_memory_of_their_own(model_dir: Path) -> None:
    assert {parameter.data_ptr() % 64 for parameter in load_model(model_dir).parameters()} == {0}
