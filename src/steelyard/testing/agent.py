"""A black-box agent: the official OpenAI client against a gateway over HTTP, and nothing else."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI

from steelyard.testing.gateway import ATTEMPT, GatewayWorld
from steelyard.types import Trace, Turn


class Agent:
    """Keeps the messages of one conversation as a harness would, and asks the gateway for the next."""

    def __init__(self, client: AsyncOpenAI, tools: Any = None) -> None:
        self._client = client
        self._options: dict[str, Any] = {} if tools is None else {"tools": tools}
        self.messages: list[Any] = []

    async def say(self, content: str) -> Any:
        """Send a user message; returns the assistant's message, which is kept as the client gave it."""
        self.messages.append({"role": "user", "content": content})
        return await self.ask()

    async def answer(self, message: Any, *contents: str) -> Any:
        """Answer the tool calls of ``message`` in order, then ask for the next message."""
        for call, content in zip(message.tool_calls, contents, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return await self.ask()

    async def ask(self) -> Any:
        """One model call."""
        reply = await self._client.chat.completions.create(model="any", messages=self.messages, **self._options)
        self.messages.append(reply.choices[0].message)
        return reply.choices[0].message


def run_agent(world: GatewayWorld, play: Callable[[Agent], Awaitable[None]], tools: Any = None) -> Trace:
    """Start the gateway, let ``play`` use it over HTTP, seal the attempt; returns its sealed trace."""

    async def whole() -> Trace:
        try:
            url = await world.server.start()
            async with AsyncOpenAI(base_url=url, api_key=world.key(), max_retries=0, timeout=30) as client:
                await play(Agent(client, tools))
            await world.seal()
            trace, _ = await world.store.read(ATTEMPT)
            return trace
        finally:
            await world.close()

    return asyncio.run(whole())


def extends(turn: Turn, before: Turn) -> bool:
    """Whether the prompt of ``turn`` starts with the prompt of ``before`` and what was sampled for it."""
    known = (*before.prompt_token_ids, *before.token_ids)
    return turn.prompt_token_ids[: len(known)] == known
