"""The log file of a run."""

import logging
import resource
from pathlib import Path

import pytest

from steelyard.log import log_to_file


def test_a_log_that_the_disk_refuses_says_nothing_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    handler = log_to_file(path)
    logger = logging.getLogger("steelyard.test")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    level = logging.getLogger().level
    try:
        logger.info("on the disk")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
        logger.info("nowhere")
        handler.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        logging.getLogger().removeHandler(handler)
        logging.getLogger().setLevel(level)
    assert '"message":"on the disk"' in path.read_text()
    assert capsys.readouterr().err == ""
