"""Demonstrations as token sequences, equal to what the gateway will show and record when the policy samples."""

from steelyard.environments.repair.demonstrations import Demonstration
from steelyard.gateway.renderer import Renderer
from steelyard.trainer.quick_recipe import IM_START, TokenSequence

_ASSISTANT = f"{IM_START}assistant\n"


def demonstration_text(renderer: Renderer, demonstration: Demonstration) -> str:
    """The conversation as the template writes it, for training a tokenizer."""
    return renderer.text_of(demonstration.messages, demonstration.tools)


def token_sequence(renderer: Renderer, demonstration: Demonstration) -> TokenSequence:
    """One sequence; the mask is 1 where the assistant speaks, its end-of-turn token included.

    Rendered in one piece, which is much cheaper than turn by turn and the same: the gateway's pieces end at control
    tokens, and content can hold none.
    """
    spoken = max(i for i, message in enumerate(demonstration.messages) if message.role == "assistant")
    # What a tool said after the last word of the assistant teaches nothing.
    token_ids = renderer.first_prompt(demonstration.messages[: spoken + 1], demonstration.tools).token_ids
    end_id = renderer.end_of_turn_id
    head = tuple(renderer.codec.encode(_ASSISTANT, is_start=False))
    mask = [0] * len(token_ids)
    position = num_tokens = 0
    while position < len(token_ids):
        if token_ids[position : position + len(head)] != head:
            position += 1
            continue
        start = position + len(head)
        if start == len(token_ids):
            break  # the prompt to go on
        position = token_ids.index(end_id, start) + 1
        mask[start:position] = [1] * (position - start)
        num_tokens = position
    return TokenSequence(token_ids=token_ids[:num_tokens], loss_mask=tuple(mask[:num_tokens]))
