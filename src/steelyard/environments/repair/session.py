"""The session of ``repair``: reads and writes the file in the sandbox, and runs the visible tests there."""

from collections.abc import Mapping
from typing import Any

import msgspec

from steelyard.environments.base import Sandbox, Services, ToolOutcome
from steelyard.environments.repair.state import PublicTask, RepairState, ReplaceLine, ToolName
from steelyard.environments.repair.template import FUNCTION_NAME
from steelyard.types import Message, ToolCall

SOURCE_FILE = "solution.py"
MAX_SOURCE_BYTES = 16_384

_encoder = msgspec.msgpack.Encoder()


class RepairSession:
    """One attempt. The file in the sandbox is what is edited and tested; the rules are in ``state.py``.

    Args:
        public: the task without its private part.
        services: how to run the agent's function.
    """

    def __init__(self, public: PublicTask, services: Services) -> None:
        self._state = RepairState(public)
        self._services = services

    @property
    def files(self) -> Mapping[str, bytes]:
        return {SOURCE_FILE: self._state.public.source.encode()}

    async def call(self, sandbox: Any, call: ToolCall) -> ToolOutcome:
        """Run one tool; failures of the sandbox raise."""
        arguments = self._state.decode(call)
        if isinstance(arguments, ToolOutcome):
            return arguments
        source = await _read_source(sandbox)
        if source is None:
            return self._state.unreadable(call.name)
        if isinstance(arguments, ReplaceLine):
            return await self._replace(sandbox, source, arguments)
        if call.name == ToolName.SUBMIT:
            return self._state.submit(source)
        return await self._run_tests(sandbox, source)

    def no_call(self, message: Message) -> ToolOutcome:
        """Told to the agent; the attempt goes on."""
        return self._state.no_call()

    def turn_ended(self) -> None:
        self._state.turn_ended()

    async def submit(self, sandbox: Any, answer: str) -> None:
        """The file as it stands is the answer."""
        source = await _read_source(sandbox)
        if source is not None:
            self._state.submit(source)

    def artifact(self) -> bytes:
        return _encoder.encode(self._state.artifact())

    async def _replace(self, sandbox: Sandbox, source: str, edit: ReplaceLine) -> ToolOutcome:
        changed, outcome = self._state.replace(source, edit)
        if changed is not None:
            await sandbox.write_file(SOURCE_FILE, changed.encode())
        return outcome

    async def _run_tests(self, sandbox: Sandbox, source: str) -> ToolOutcome:
        inputs = [case.arguments for case in self._state.public.visible]
        results = await self._services.run_function(
            sandbox, source, FUNCTION_NAME, inputs, self._services.call_deadline_s
        )
        return self._state.tested(source, results)


async def _read_source(sandbox: Sandbox) -> str | None:
    """The file, or None where the agent's code removed it or made something else of it."""
    try:
        data = await sandbox.read_file(SOURCE_FILE)
        return data.decode() if len(data) <= MAX_SOURCE_BYTES else None
    except (FileNotFoundError, UnicodeDecodeError):
        return None
