from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from steelyard import config_file
from steelyard.config import Config
from steelyard.errors import ConfigError, InputError
from steelyard.keys import known_keys


def test_defaults_are_valid_and_survive_a_round_trip_through_yaml() -> None:
    config = config_file.load(None)
    assert config_file.from_tree(yaml.safe_load(config_file.to_yaml(config))) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rolout.max_turns=3", "rolout.max_turns is not a configuration key; the nearest is rollout.max_turns"),
        ("train.lr=3", "train.lr is not a configuration key; the nearest is train.learning_rate"),
        ("rolout={}", "rolout is not a configuration key; the nearest is rollout"),
        ("train.max_step=3", "train.max_step is not a configuration key; the nearest is train.max_steps"),
        ("train.batch_size=30", "train.batch_size must be divisible by rollout.group_size (8), got 30; 24 or 32 would"),
        ("train.batch_size=many", "train.batch_size must be of type int, got str"),
        ("model=3", "model must be a section of keys, got 3"),
        ("rollout.top_p=0", "rollout.top_p must be > 0 and <= 1, got 0.0"),
        ("rollout.temperature=.nan", "rollout.temperature must be >= 0, got nan"),
        ("train.learning_rate=.inf", "train.learning_rate must be a finite number > 0, got inf"),
        ("resources.train_gpus=0", "resources.train_gpus must be >= 1, got 0"),
        ("resources.rollout_gpus=0", "resources.rollout_gpus must be >= 1, got 0"),
        ("rollout.max_tokens=1024", "rollout.max_tokens must be < model.max_context_tokens (1024), got 1024"),
        ("weights.max_retained_versions=2", "weights.max_retained_versions must be >= admission.max_policy_lag + 2"),
        ("algorithm.min_scored=9", "algorithm.min_scored must be <= rollout.group_size (8), got 9"),
        ("rollout.budget_tokens=0", "rollout.budget_tokens must be >= 1 or null, got 0"),
        ("rollout.budget_s=0", "rollout.budget_s must be a finite number > 0, got 0"),
        ("rollout.budget_s=.nan", "rollout.budget_s must be a finite number > 0, got nan"),
        ("admission.priority_ageing_s=-1", "admission.priority_ageing_s must be a finite number > 0, got -1"),
        ("runtime=ray", "runtime.kind must be local in this version, got ray"),
        ("runtime.kind=cloud", "runtime.kind "),
        ("train.max_steps", "an override must look like train.max_steps=10, got 'train.max_steps'"),
        ("train.max_steps.deep=1", "train.max_steps must be "),
    ],
)
def test_a_bad_override_is_refused_with_the_name_of_its_field(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_file.load(None, [override])
    assert str(caught.value).startswith(message)


def test_small_numbers_in_scientific_notation_are_numbers() -> None:
    assert config_file.load(None, ["train.learning_rate=1e-4"]).train.learning_rate == 1e-4


def test_runtime_may_be_written_as_its_kind_alone_and_overridden() -> None:
    tree = {"runtime": "local"}
    assert config_file.from_tree(tree).runtime.kind == "local"


def test_a_missing_file_and_one_that_is_no_mapping_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be readable"):
        config_file.load(tmp_path / "absent.yaml")
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n- 2\n")
    with pytest.raises(InputError, match="must be a mapping of keys, got a list"):
        config_file.load(path)
    path.write_text("a: [1\n")
    with pytest.raises(InputError, match="must be YAML"):
        config_file.load(path)


@given(st.sampled_from(sorted(known_keys(Config))), st.integers(0, 30), st.characters(categories=["Ll"]))
def test_every_misspelt_key_is_refused_and_the_message_names_a_valid_key(key: str, at: int, letter: str) -> None:
    spoilt = key[: at % len(key)] + letter + key[at % len(key) :]
    keys = set(known_keys(Config))
    if spoilt in keys or "." not in spoilt or spoilt.startswith("environment.options."):
        return
    with pytest.raises(ConfigError) as caught:
        config_file.load(None, [f"{spoilt}=1"])
    named = str(caught.value).rsplit("the nearest is ", maxsplit=1)[-1]
    assert named in keys or "must be a section" in str(caught.value)


JOURNAL = {"kind": "postgres", "url": "postgresql://me@host/runs", "name": "run-1"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": None}, "journal.url must be given with journal.kind postgres, got none"),
        ({"name": ""}, "journal.name must be given with journal.kind postgres, got none"),
        ({"name": "a\nb"}, "journal.name must be at most 200 printable characters, got 'a\\nb'"),
        ({"name": "n" * 201}, "journal.name must be at most 200 printable characters, got 'nnn"),
        (
            {"kind": "sqlite", "name": None},
            "journal.url must be unset unless journal.kind is postgres, got",
        ),
        ({"kind": "sqlite", "url": None}, "journal.name must be unset unless journal.kind is postgres, got"),
        ({"lease_s": 0.5}, "journal.lease_s must be >= 1, got 0.5"),
        ({"lease_s": float("inf")}, "journal.lease_s must be a finite number >= 1, got inf"),
        ({"url": "host=db user=me"}, "journal.url must begin with postgresql://, got another"),
        ({"url": "mysql://host/runs"}, "journal.url must begin with postgresql://, got another"),
        ({"url": "postgresql://[host/runs"}, "journal.url must be a URL"),
    ],
)
def test_a_postgres_journal_is_checked_field_by_field(change: dict[str, object], message: str) -> None:
    assert config_file.from_tree({"journal": JOURNAL}).journal.kind == "postgres"
    with pytest.raises(ConfigError) as caught:
        config_file.from_tree({"journal": {**JOURNAL, **change}})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:opensesame@host/runs",
        "postgresql://me:open@sesame:opensesame@host/runs",
        "postgresql://me:opensesame/@host/runs",
        "postgresql://me:opensesame?@host/runs",
        "postgresql://me:opensesame#@host/runs",
        "postgresql://me@host/runs?password=opensesame",
        "postgresql://me@host/runs?pass%77ord=opensesame",
        "postgresql://me@host/runs?sslmode=require&sslpassword=opensesame",
        "postgresql://me:opensesame@[host/runs",
        "opensesame://host/runs?password=opensesame",
    ],
)
def test_a_password_in_the_url_of_a_journal_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"journal\.url must") as caught:
        config_file.from_tree({"journal": {**JOURNAL, "url": url}})
    assert "opensesame" not in str(caught.value)


def test_groups_per_batch_is_the_batch_divided_by_the_group() -> None:
    assert Config().groups_per_batch * Config().rollout.group_size == Config().train.batch_size
