"""What one call of the policy needs: its prompt, what it extends, how its reply is to end.

A request extends the recorded turn with the longest equal message prefix; see :mod:`steelyard.gateway.history`.
"""

import msgspec

from steelyard.errors import InputError
from steelyard.gateway.history import History, Kind, RecordedTurn
from steelyard.gateway.renderer import Prompt, Renderer
from steelyard.types import ChatRequest, Message

_ROLES = ("system", "user", "assistant", "tool")


class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Continue a prompt that the caller rendered, as text (control strings count) or as token ids."""

    prompt: str | tuple[int, ...]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


class Planned(msgspec.Struct, kw_only=True):
    """One call on its way: what was asked and what it extends.

    ``opening``: the beginning of the reply that stands in the prompt. ``closing``: the end of a tool call, where the
    first is to end the reply; ``is_single`` says that the first is all that is wanted.
    """

    kind: Kind
    prompt: Prompt
    parent: RecordedTurn | None
    break_reason: str | None
    reads_calls: bool
    is_open: bool
    stops: tuple[str, ...]
    max_tokens: int | None
    seed: int | None
    deadline_at_s: float | None = None
    opening: str = ""
    closing: str | None = None
    is_single: bool = False

    @property
    def all_stops(self) -> tuple[str, ...]:
        """Strings that end generation."""
        return self.stops if self.closing is None else (*self.stops, self.closing)


def plan_chat(renderer: Renderer, history: History, request: ChatRequest) -> Planned:
    """A chat request on its way.

    Raises:
        InputError: the messages are not a conversation, or the template refuses them.
    """
    messages = history.restored(normal_messages(request.messages))
    parent = history.find_chat(messages)
    if parent is None:
        prompt, break_reason = renderer.first_prompt(messages, request.tools), None
    else:
        added = messages[parent.num_messages + 1 :]
        extension = renderer.extend(parent.as_previous(), added, request.tools)
        prompt, break_reason = extension.prompt, extension.break_reason
    opening = ""
    if request.must_call is not None:
        prompt, opening = renderer.opened(prompt, request.must_call.tool)
    parser = renderer.reader.parser
    return Planned(
        kind="chat",
        prompt=prompt,
        parent=parent,
        break_reason=break_reason,
        reads_calls=bool(request.tools),
        is_open=renderer.reader.is_open(prompt.text),
        stops=request.stop,
        max_tokens=request.max_tokens,
        seed=request.seed,
        opening=opening,
        closing=parser.closing if parser is not None and request.single_call and request.tools else None,
        is_single=request.single_call,
    )


def plan_text(renderer: Renderer, history: History, request: TextRequest) -> Planned:
    """A prompt of the caller's own on its way.

    Raises:
        InputError: it is empty, or holds ids that are no tokens.
    """
    parent, break_reason, prompt = None, None, request.prompt
    if not prompt:
        raise InputError("prompt must not be empty")
    if isinstance(prompt, str):
        parent = history.find_text(prompt)
        if parent is None:
            made = renderer.text_prompt(prompt)
        else:
            extension = renderer.text_extension(parent.as_previous(), parent.reply_text, prompt)
            made, break_reason = extension.prompt, extension.break_reason
    else:
        num_ids = renderer.codec.num_ids
        if min(prompt) < 0 or max(prompt) >= num_ids:
            raise InputError(f"prompt must hold token ids from 0 to {num_ids - 1}")
        parent = history.find_tokens(prompt)
        made = Prompt(token_ids=prompt, text=renderer.codec.decode(prompt), messages=())
    return Planned(
        kind="text",
        prompt=made,
        parent=parent,
        break_reason=break_reason,
        reads_calls=False,
        is_open=False,
        stops=request.stop,
        max_tokens=request.max_tokens,
        seed=request.seed,
    )


def normal_messages(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Messages in the one form in which they are compared: content is None only beside tool calls.

    Raises:
        InputError: there are none, or one has an unknown role or lacks what its role needs.
    """
    if not messages:
        raise InputError("messages must hold at least one message")
    return tuple(_normal_message(index, message) for index, message in enumerate(messages))


def _normal_message(index: int, message: Message) -> Message:
    if message.role not in _ROLES:
        raise InputError(f"messages[{index}].role must be one of {', '.join(_ROLES)}, not {message.role!r}")
    if message.tool_calls and message.role != "assistant":
        raise InputError(f"messages[{index}].tool_calls may stand only in an assistant message, not in {message.role}")
    content = message.content or (None if message.tool_calls else "")
    return message if content == message.content else msgspec.structs.replace(message, content=content)
