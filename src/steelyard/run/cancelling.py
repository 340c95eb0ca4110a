"""Cancelling groups of a run from the command line, over the protocol of the coordinator."""

import asyncio
import random
from pathlib import Path

from steelyard.clock import SystemClock
from steelyard.coordinator.capability import Role
from steelyard.coordinator.client import ClientSettings, CoordinatorClient
from steelyard.coordinator.trainer_link import OperatorLink
from steelyard.errors import InputError
from steelyard.ids import RandomIds
from steelyard.metrics import Counters
from steelyard.run.directory import existing_directory
from steelyard.run.secret import issue_key

_NAME = "cancel"
_KEY_S = 300.0
_DEADLINE_S = 15.0


def local_access(run: str) -> tuple[str, str]:
    """URL and a key of an operator for a few minutes, for whoever may read the secret of the run.

    Raises:
        InputError: there is no run, or no coordinator has served it.
    """
    directory = existing_directory(run)
    if not directory.url.is_file():
        raise InputError(
            f"{run} must be a run whose coordinator serves others (coordinator.port, or steelyard coordinator), "
            f"there is no {directory.url.name}"
        )
    key = issue_key(directory, Role.OPERATOR, _NAME, SystemClock().now_s() + _KEY_S)
    return directory.url.read_text(encoding="ascii").strip(), key


def read_key(path: Path) -> str:
    """The key in a file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise InputError(f"--key-file must be a readable file, got {path}: {error.strerror}") from None


def cancel(url: str, key: str, *, group_id: str | None, task_id: str | None, reason: str) -> tuple[str, ...]:
    """Cancel a group, or all live groups of a task; the ids of those that were.

    Raises:
        Refused: the key is none of an operator of this run.
        RunError: the coordinator cannot be reached.
    """

    async def ask() -> tuple[str, ...]:
        async with CoordinatorClient(
            url.split(","),
            key,
            ids=RandomIds(),
            counters=Counters(),
            draw=random.Random(),
            settings=ClientSettings(call_deadline_s=_DEADLINE_S),
        ) as client:
            operator = OperatorLink(client)
            if group_id is not None:
                return (group_id,) if await operator.cancel_group(group_id, reason) else ()
            return await operator.cancel_task(task_id or "", reason)

    return asyncio.run(ask())
