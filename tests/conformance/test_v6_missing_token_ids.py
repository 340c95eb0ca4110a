"""V6: no token ids from the backend; text was re-encoded, log-probabilities were padded with 0.0."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from steelyard.testing.gateway import ATTEMPT, GatewayWorld, Say


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ({"token_ids": ()}, "token_ids must hold the sampled tokens"),
        ({"logprobs": ()}, "one number for each"),
        ({"logprobs": (-0.5,)}, "one number for each"),
        ({"kept_logmass": ()}, "one number for each"),
        ({"logprobs": (float("nan"),) * 6}, r"logprobs\[0\] must be finite"),
        ({"version_spans": ()}, "version_spans must start at 0"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_v6_an_answer_without_what_training_needs_is_an_error_that_names_engine_and_request(
    tmp_path: Path, missing: dict[str, object], named: str, stream: bool
) -> None:
    world = GatewayWorld(tmp_path, [Say(text="Hello", changes=missing)])

    async def scenario() -> None:
        try:
            url = await world.server.start()
            async with AsyncOpenAI(base_url=url, api_key=world.key(), max_retries=0, timeout=30) as client:
                request_id = await ask(client)
                assert request_id == world.generator.requests[0].request_id
            assert world.store.open_turns(ATTEMPT) == (), "nothing is recorded, and nothing is filled in"
            assert world.ledger.total == 0
        finally:
            await world.close()

    async def ask(client: AsyncOpenAI) -> str:
        with pytest.raises(openai.APIError, match=rf"engine local .*request req_\w+: .*{named}") as caught:
            answer: Any = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=stream
            )
            async for _ in answer:
                pass
        return str(caught.value).split("request ")[1].split(":")[0]

    asyncio.run(scenario())
