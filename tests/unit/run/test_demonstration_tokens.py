import itertools
from pathlib import Path

import pytest

from steelyard.environments.repair.demonstrations import Demonstration, Mixture, demonstrations
from steelyard.environments.repair.exercises import exercises
from steelyard.gateway.renderer import PreviousTurn, Renderer
from steelyard.run.demonstration_tokens import demonstration_text, token_sequence
from steelyard.testing.tokenizer import write_tokenizer
from steelyard.trainer.quick_recipe import IM_END, TokenSequence


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Renderer.load(Path(directory))


def turn_by_turn(renderer: Renderer, demonstration: Demonstration) -> TokenSequence:
    """As the gateway does it: each prompt extends the tokens of the turn before it."""
    messages = demonstration.messages
    previous: PreviousTurn | None = None
    known = 0
    token_ids: tuple[int, ...] = ()
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        if previous is None:
            prompt = renderer.first_prompt(messages[:index], demonstration.tools)
        else:
            extension = renderer.extend(previous, messages[known:index], demonstration.tools)
            assert extension.break_reason is None
            prompt = extension.prompt
        said = message.content or "".join(
            f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>'
            for call in message.tool_calls
        )
        sampled = tuple(renderer.codec.encode(said + IM_END, is_start=False))
        spans.append((len(prompt.token_ids), len(prompt.token_ids) + len(sampled)))
        token_ids = prompt.token_ids + sampled
        previous, known = PreviousTurn(prompt=prompt, token_ids=sampled, reply=message), index + 1
    mask = [0] * len(token_ids)
    for start, stop in spans:
        mask[start:stop] = [1] * (stop - start)
    return TokenSequence(token_ids=token_ids, loss_mask=tuple(mask))


def test_a_demonstration_in_one_piece_has_the_tokens_that_the_gateway_would_show_and_record(renderer: Renderer) -> None:
    sources = itertools.chain(itertools.islice(demonstrations(3, Mixture()), 60), itertools.islice(exercises(3), 20))
    for demonstration in sources:
        assert token_sequence(renderer, demonstration) == turn_by_turn(renderer, demonstration)


def test_the_text_for_the_tokenizer_holds_what_everybody_says(renderer: Renderer) -> None:
    demonstration = next(demonstrations(0, Mixture()))
    text = demonstration_text(renderer, demonstration)
    for message in demonstration.messages:
        assert (message.content or "") in text
        assert all(call.arguments in text for call in message.tool_calls)
    assert all(tool.name in text for tool in demonstration.tools)
