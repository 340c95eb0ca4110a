"""The run that only evaluates."""

import pytest
import yaml

from steelyard import config_file
from steelyard.cli.evaluate import evaluation_only
from steelyard.errors import InputError


def test_an_evaluation_trains_nothing_and_keeps_its_journal_in_its_own_directory() -> None:
    journal = {"kind": "postgres", "url": "postgresql://me@host/runs", "name": "run-1"}
    config = evaluation_only(config_file.from_tree({"eval": {"num_tasks": 4}, "journal": journal}))
    assert config.train.max_steps == 0
    assert (config.journal.kind, config.journal.url, config.journal.name) == ("sqlite", None, None)
    assert config_file.from_tree(yaml.safe_load(config_file.to_yaml(config))) == config


def test_an_evaluation_of_no_tasks_is_refused() -> None:
    with pytest.raises(InputError, match=r"eval\.num_tasks must be >= 1"):
        evaluation_only(config_file.from_tree({}))
