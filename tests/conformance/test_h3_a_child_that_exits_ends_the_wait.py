"""H3: an environment server died at start, and the parent waited its full 600 s.

The exit of a child ends the wait for it, and the error shows the end of its log.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest

from steelyard.config import RuntimeConfig
from steelyard.coordinator.capability import Role
from steelyard.errors import ProcessDied
from steelyard.run.joining import own_home
from steelyard.run.remote_scorer import ScorerOptions, run_scorer
from steelyard.testing.joined_rig import CONFIG, JoinedRig

WAIT_S = 600.0


def test_h3_a_grader_that_exits_at_once_ends_the_start_of_its_scorer_with_the_end_of_its_log(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, runtime=RuntimeConfig(start_deadline_s=WAIT_S))
    joined = JoinedRig(tmp_path)

    async def scene() -> None:
        async with joined:
            options = ScorerOptions(
                coordinators=(joined.coordinator_url,), key_file=joined.key_file(Role.SCORER), home=str(joined.home)
            )
            await spoil(options)
            async with asyncio.timeout(60):
                with pytest.raises(ProcessDied) as caught:
                    await run_scorer(config, options)
        assert caught.value.returncode == 1
        assert "ended with exit code 1; the end of its log:" in str(caught.value)
        assert "NotADirectoryError" in caught.value.log_tail

    asyncio.run(scene())  # its minute is a tenth of what the parent may wait


async def spoil(options: ScorerOptions) -> None:
    """Put a file where the grader wants to note its sandboxes."""
    async with own_home(options, Path(options.key_file).read_text()) as home:
        (home / "sandboxes").write_text("")
