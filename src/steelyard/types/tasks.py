"""Tasks, messages, tools, and how to sample."""

from typing import Any

from steelyard.types.outcomes import Effects
from steelyard.types.record import Record


class ToolCall(Record, frozen=True, kw_only=True):
    """A call as parsed from sampled text. ``arguments`` is the JSON text exactly as sampled."""

    id: str
    name: str
    arguments: str


class Message(Record, frozen=True, kw_only=True):
    """One chat message. ``content`` is None only for an assistant message with tool calls, or one whose reasoning
    was cut off before its end.

    ``reasoning``: what an assistant thought before it spoke, without the marks around it.
    """

    role: str
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


class ToolSpec(Record, frozen=True, kw_only=True):
    """A tool as shown to the model; ``parameters`` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]
    effects: Effects = Effects.SANDBOX


class Task(Record, frozen=True, kw_only=True):
    """One prompt of an environment. ``public`` is what the agent's sandbox may hold; nothing private."""

    task_id: str
    environment: str
    environment_version: str
    split: str
    index: int
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    public: bytes = b""


class TaskRef(Record, frozen=True, kw_only=True):
    """A place in a task stream: which task comes at ``position`` (0, 1, 2, ...), and in which pass over all tasks.

    Of the groups that are admitted those of a higher ``priority`` are leased earlier; the order of admission stays.
    """

    position: int
    epoch: int
    task_index: int
    task_id: str
    priority: int = 0


class Sampling(Record, frozen=True, kw_only=True):
    """How to sample. ``temperature`` 0 is greedy; recorded log-probabilities are then at temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int | None = None
