"""The process that builds the quick policy: ``python -m steelyard.run.policy_process OPTIONS.json``.

Demonstrations -> tokenizer -> token sequences -> supervised warm-up. It has the machine to itself, since the run
waits for it, and so may use several threads.
"""

import asyncio
import itertools
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from steelyard.environments.repair.demonstrations import demonstrations
from steelyard.gateway.renderer import Renderer
from steelyard.processes.channel import Server
from steelyard.run.children import ChildOptions, run_child
from steelyard.run.demonstration_tokens import demonstration_text, token_sequence
from steelyard.run.policy import BUILD, BuildRequest
from steelyard.trainer.quick_policy import warm_up
from steelyard.trainer.quick_recipe import (
    OnProgress,
    QuickPolicyRecipe,
    TokenSequence,
    WarmUpProgress,
    WarmUpReport,
    write_quick_tokenizer,
)

_NUM_TOKENIZER_TEXTS = 2000


def build(request: BuildRequest, on_progress: OnProgress) -> WarmUpReport:
    """Fill ``request.directory`` with the quick policy."""
    directory = Path(request.directory)
    recipe = request.recipe
    template = files("steelyard.gateway").joinpath("templates/chatml_hermes.jinja").read_text(encoding="utf-8")
    stream = demonstrations(recipe.seed, request.mixture, request.max_turns)
    first = list(itertools.islice(stream, _NUM_TOKENIZER_TEXTS))
    num_tokens = write_quick_tokenizer(directory, map(demonstration_text, first), template, recipe.vocab_size)
    renderer = Renderer.load(directory)
    sequences = [token_sequence(renderer, demonstration) for demonstration in first]
    for demonstration in itertools.islice(stream, _num_more(sequences, recipe)):
        sequences.append(token_sequence(renderer, demonstration))
    return warm_up(directory, num_tokens, sequences, recipe, on_progress)


def _num_more(sequences: list[TokenSequence], recipe: QuickPolicyRecipe) -> int:
    """So many more sequences that none is seen twice."""
    mean_tokens = sum(len(sequence.token_ids) for sequence in sequences) / len(sequences)
    return max(0, round(recipe.num_steps * recipe.batch_tokens / mean_tokens) - len(sequences))


async def serve(options: ChildOptions, stop: asyncio.Event) -> None:
    """Serve builds until ``stop`` is set."""
    loop = asyncio.get_running_loop()

    async def answer(request: BuildRequest, emit: Callable[[WarmUpProgress], None]) -> WarmUpReport:
        def on_progress(progress: WarmUpProgress) -> None:
            loop.call_soon_threadsafe(emit, progress)

        return await asyncio.to_thread(build, request, on_progress)

    server = Server()
    server.handle_streaming(BUILD, answer)
    await server.serve(Path(options.socket_path))
    await stop.wait()
    await server.close()


if __name__ == "__main__":
    run_child(ChildOptions, serve)
