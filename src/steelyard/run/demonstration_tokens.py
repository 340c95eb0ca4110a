"""Demonstrations as token sequences, rendered as the gateway will render them when the policy samples."""

from steelyard.environments.repair.demonstrations import Demonstration
from steelyard.gateway.renderer import PreviousTurn, Prompt, Renderer
from steelyard.trainer.quick_recipe import IM_END, TokenSequence
from steelyard.types import Message


def demonstration_text(demonstration: Demonstration) -> str:
    """The conversation as plain text, for training a tokenizer."""
    parts = [
        spoken(message) if message.role == "assistant" else message.content or "" for message in demonstration.messages
    ]
    return "\n".join(parts)


def token_sequence(renderer: Renderer, demonstration: Demonstration) -> TokenSequence:
    """One sequence; the mask is 1 where the assistant speaks, its end-of-turn token included."""
    messages = demonstration.messages
    prompt: Prompt | None = None
    previous: PreviousTurn | None = None
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        if previous is None:
            prompt = renderer.first_prompt(messages[:index], demonstration.tools)
        else:
            prompt = renderer.extend(previous, messages[:index], demonstration.tools).prompt
        said = tuple(renderer.codec.encode(spoken(message) + IM_END, is_start=False))
        spans.append((len(prompt.token_ids), len(prompt.token_ids) + len(said)))
        previous = PreviousTurn(prompt=prompt, token_ids=said, reply=message)
    if previous is None or prompt is None:
        raise ValueError(f"demonstration {demonstration.task_id} must hold at least one assistant message")
    token_ids = (*prompt.token_ids, *previous.token_ids)
    mask = [0] * len(token_ids)
    for start, stop in spans:
        mask[start:stop] = [1] * (stop - start)
    return TokenSequence(token_ids=token_ids, loss_mask=tuple(mask))


def spoken(message: Message) -> str:
    """What a policy writes to say ``message``, in the Hermes form."""
    calls = [
        f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>'
        for call in message.tool_calls
    ]
    return "\n".join([*([message.content] if message.content else []), *calls])
