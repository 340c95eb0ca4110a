"""Which calls of a client are under way or answered: the same call again gets the same answer.

A session numbers its calls. Its client says below which number it has all answers, and those are forgotten; a call
from below comes late and is refused. So what is remembered is bounded by what a client has not heard yet. A session
is forgotten with the process, or when its worker has begun too many others. Calls that come again after that are
safe by their content: see docs/protocol.md.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from steelyard.coordinator.protocol import MAX_OPEN_CALLS, POLLS, Call, NumberedCall, Result
from steelyard.errors import InputError, Refused


class Uncommitted(NamedTuple):
    """The result of a call that is done. It may be told once the first ``num_events`` events are durable."""

    result: Result
    num_events: int


Outcome: TypeAlias = "asyncio.Task[Result] | Uncommitted"
"""Of a call that has begun. A task ends with a result that may be told at once, or by being cancelled."""

Perform = Callable[[Call], Outcome]
"""Begins a call."""

MAX_SESSIONS_PER_WORKER = 8


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call whose client may not have its answer. ``num_waiting``: requests that wait for it."""

    call: Call
    outcome: Outcome
    num_waiting: int = 0

    @property
    def is_poll(self) -> bool:
        return isinstance(self.call, POLLS)

    def withdraw(self) -> None:
        """Nobody will ask for the answer: end the wait, if it is one."""
        if isinstance(self.outcome, asyncio.Task):
            self.outcome.cancel()


class Session:
    """Calls of one client, in its own numbering."""

    def __init__(self) -> None:
        self._answered_below = 0
        self._open: dict[int, OpenCall] = {}

    def forget_below(self, sequence: int) -> None:
        """The client has the answers of all calls with a smaller number; polls among them are withdrawn."""
        if sequence <= self._answered_below:
            return
        self._answered_below = sequence
        for number in [number for number in self._open if number < sequence]:
            open_call = self._open.pop(number)
            if open_call.is_poll:
                open_call.withdraw()

    def enter(self, numbered: NumberedCall, perform: Perform) -> tuple[OpenCall, bool]:
        """The call under this number, begun unless it was before; and whether it was.

        Raises:
            Refused: ``late`` where the client has its answer already, ``double`` where the number was used for another.
            InputError: the number is too far ahead of what the client has answers to.
        """
        sequence = numbered.sequence
        known = self._open.get(sequence)
        if known is not None:
            if known.call != numbered.call:
                raise Refused("double", f"sequence {sequence} was used for another call")
            return known, True
        if sequence < self._answered_below:
            raise Refused("late", f"sequence {sequence} is below {self._answered_below}: it was answered already")
        if sequence >= self._answered_below + MAX_OPEN_CALLS:
            limit = self._answered_below + MAX_OPEN_CALLS
            raise InputError(f"sequence: must be below answered_below + {MAX_OPEN_CALLS} = {limit}, got {sequence}")
        begun = self._open[sequence] = OpenCall(numbered.call, perform(numbered.call))
        return begun, False

    def withdraw(self, sequence: int) -> None:
        """Nobody waits for this poll any more. What it may have been granted is handed out again by the next one."""
        self._open.pop(sequence).withdraw()

    def holds(self, sequence: int, open_call: OpenCall) -> bool:
        """Whether the call is still known under this number."""
        return self._open.get(sequence) is open_call

    @property
    def num_open(self) -> int:
        """Calls that are remembered."""
        return len(self._open)


class Sessions:
    """The sessions of all workers; of each worker those used last."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[str, Session]] = {}

    def session(self, worker: str, session_id: str) -> Session:
        """The session of that name, begun where it is not known. ``worker`` must be unlike for unlike keys."""
        sessions = self._of.setdefault(worker, OrderedDict())
        session = sessions.get(session_id)
        if session is None:
            session = sessions[session_id] = Session()
            while len(sessions) > MAX_SESSIONS_PER_WORKER:
                sessions.popitem(last=False)
        sessions.move_to_end(session_id)
        return session
