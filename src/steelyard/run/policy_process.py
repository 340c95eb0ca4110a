"""The process that builds the quick policy: ``python -m steelyard.run.policy_process OPTIONS.json``.

Demonstrations -> tokenizer -> token sequences -> supervised warm-up. It has the machine to itself, since the run
waits for it, and so may use several threads.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

from steelyard.environments.repair.demonstrations import Demonstration, demonstrations
from steelyard.environments.repair.exercises import exercises
from steelyard.gateway.renderer import Renderer
from steelyard.processes.channel import Server
from steelyard.run.children import ChildOptions, run_child
from steelyard.run.demonstration_tokens import demonstration_text, token_sequence
from steelyard.run.policy import BUILD, BuildRequest
from steelyard.trainer.quick_policy import warm_up
from steelyard.trainer.quick_recipe import (
    OnProgress,
    TokenSequence,
    WarmUpProgress,
    WarmUpReport,
    write_quick_tokenizer,
)

_NUM_TOKENIZER_TEXTS = 1500
_NO_MERGES = 261
"""256 bytes, three control tokens, two call marks."""


def build(request: BuildRequest, on_progress: OnProgress) -> WarmUpReport:
    """Fill ``request.directory`` with the quick policy."""
    directory = Path(request.directory)
    recipe = request.recipe
    template = files("steelyard.gateway").joinpath("templates/chatml_hermes.jinja").read_text(encoding="utf-8")
    sources = (demonstrations(recipe.seed, request.mixture, request.max_turns), exercises(recipe.seed))
    samples = [list(itertools.islice(source, _NUM_TOKENIZER_TEXTS)) for source in sources]
    texts = _texts(directory, [one for sample in samples for one in sample], template)
    num_tokens = write_quick_tokenizer(directory, texts, template, recipe.vocab_size)
    renderer = Renderer.load(directory)
    sequences: list[TokenSequence] = []
    for source, sample, frac in zip(
        sources, samples, (1.0 - request.exercise_frac, request.exercise_frac), strict=True
    ):
        sequences += _take(renderer, itertools.chain(sample, source), frac * recipe.num_steps * recipe.batch_tokens)
    return warm_up(directory, num_tokens, sequences, recipe, on_progress)


def _texts(directory: Path, examples: list[Demonstration], template: str) -> list[str]:
    """Examples as the template writes them; a tokenizer without any merges is enough for that."""
    write_quick_tokenizer(directory, [], template, _NO_MERGES)
    renderer = Renderer.load(directory)
    return [demonstration_text(renderer, example) for example in examples]


def _take(renderer: Renderer, source: Iterator[Demonstration], num_tokens: float) -> list[TokenSequence]:
    """So many sequences that none is seen twice in the warm-up."""
    sequences: list[TokenSequence] = []
    taken = 0
    while taken < num_tokens:
        sequences.append(token_sequence(renderer, next(source)))
        taken += len(sequences[-1].token_ids)
    return sequences


async def serve(options: ChildOptions, stop: asyncio.Event) -> None:
    """Serve builds until ``stop`` is set."""
    loop = asyncio.get_running_loop()

    async def answer(request: BuildRequest, emit: Callable[[WarmUpProgress], None]) -> WarmUpReport:
        def on_progress(progress: WarmUpProgress) -> None:
            loop.call_soon_threadsafe(emit, progress)

        return await asyncio.to_thread(build, request, on_progress)

    server = Server()
    server.handle_streaming(BUILD, answer)
    await server.serve_until(Path(options.socket_path), stop)


if __name__ == "__main__":
    run_child(ChildOptions, serve)
