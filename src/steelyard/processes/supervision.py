"""Tasks that belong together: they end together, by deadlines, and the first failure is raised as itself.

A cancelled task ends only if it lets the cancellation through. Python 3.11's ``asyncio.wait_for`` does not where the
cancellation meets the result that it waits for, so this project waits with ``asyncio.timeout``; a library may still
do it. So tasks are cancelled again after a while, and nobody waits for them longer than a deadline.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from steelyard.errors import DeadlineExceeded

logger = logging.getLogger(__name__)

END_DEADLINE_S = 30.0
CANCEL_AGAIN_S = 10.0


async def supervise(
    *loops: Coroutine[Any, Any, None], deadline_s: float = END_DEADLINE_S, again_s: float = CANCEL_AGAIN_S
) -> None:
    """Run loops until one ends or fails; then cancel the others, and raise the first failure.

    The end of any loop ends all: a run never goes on with a part missing.

    Args:
        loops: their qualified names are what messages call them.
        deadline_s: how long the others may take to end.
        again_s: after so many seconds those that have not ended are cancelled once more.

    Raises:
        DeadlineExceeded: names the loops that did not end, where none failed.
    """
    tasks = [asyncio.create_task(loop, name=getattr(loop, "__qualname__", "loop")) for loop in loops]
    late: tuple[str, ...] = ()
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        late = await end_all(tasks, deadline_s, again_s)
    for task in tasks:
        if task in done:
            task.result()
    if late:
        raise DeadlineExceeded("loops to end", late, deadline_s)


async def end_all(
    tasks: Collection[asyncio.Task[Any]], deadline_s: float = END_DEADLINE_S, again_s: float = CANCEL_AGAIN_S
) -> tuple[str, ...]:
    """Cancel tasks and wait for their ends; the names of those that have not ended by the deadline, which is logged."""
    loop = asyncio.get_running_loop()
    ends_at_s = loop.time() + deadline_s
    alive = {task for task in tasks if not task.done()}
    while alive and (left_s := ends_at_s - loop.time()) > 0:
        for task in alive:
            task.cancel()
        _, alive = await asyncio.wait(alive, timeout=min(again_s, left_s))
    late = tuple(sorted(task.get_name() for task in alive))
    if late:
        logger.error("not ended %.0f s after their cancellation: %s", deadline_s, ", ".join(late))
    return late


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An ``asyncio.TaskGroup`` that raises the first failure itself and not in a group.

    Whoever turns errors into exit codes looks at their type.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
