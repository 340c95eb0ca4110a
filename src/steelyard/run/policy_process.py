"""The process that builds the quick policy: ``python -m steelyard.run.policy_process OPTIONS.json``.

::

    demonstrations -> tokenizer -> token sequences (in two processes) -> supervised warm-up

It has the machine to itself, since the run waits for it, and so may use several processes and threads.
"""

import asyncio
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.resources import files
from pathlib import Path

import msgspec

from steelyard.environments.repair.demonstrations import Demonstration, demonstrations
from steelyard.environments.repair.exercises import exercises
from steelyard.gateway.renderer import Renderer
from steelyard.processes.channel import Server
from steelyard.processes.child import die_with_parent
from steelyard.run.children import ChildOptions, run_child
from steelyard.run.demonstration_tokens import demonstration_text, token_sequence
from steelyard.run.policy import BUILD, BuildRequest
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
_NUM_PARTS = 2
"""Parts in which sequences are made. Fixed, so that a policy does not depend on the number of cores."""


def build(request: BuildRequest, on_progress: OnProgress) -> WarmUpReport:
    """Fill ``request.directory`` with the quick policy; the recipe's time limit counts from here."""
    started_s = time.perf_counter()
    recipe = request.recipe
    num_tokens = _write_tokenizer(request)
    # Not forked: this process has threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_NUM_PARTS, context, die_with_parent, (os.getpid(),)) as pool:
        parts = [pool.submit(sequences_of_part, request, part) for part in range(_NUM_PARTS)]
        # Loaded late: the parts are made by processes that import this module too, and need no torch.
        from steelyard.trainer.quick_policy import warm_up  # noqa: PLC0415

        sequences = [sequence for part in parts for sequence in part.result()]
    left_s = max(0.0, recipe.time_limit_s - (time.perf_counter() - started_s))
    return warm_up(
        Path(request.directory),
        num_tokens,
        sequences,
        msgspec.structs.replace(recipe, time_limit_s=left_s),
        on_progress,
    )


def sequences_of_part(request: BuildRequest, part: int) -> list[TokenSequence]:
    """As many sequences as the warm-up takes, over all parts, so that it goes through none of them twice.

    Args:
        request: of the policy; its directory holds the tokenizer.
        part: below ``_NUM_PARTS``; each has demonstrations of its own.
    """
    recipe = request.recipe
    renderer = Renderer.load(Path(request.directory))
    num_tokens = recipe.num_steps * recipe.batch_tokens / _NUM_PARTS
    sequences: list[TokenSequence] = []
    for source, frac in zip(_sources(request, part), (1.0 - request.exercise_frac, request.exercise_frac), strict=True):
        taken = 0
        while taken < frac * num_tokens:
            sequences.append(token_sequence(renderer, next(source)))
            taken += len(sequences[-1].token_ids)
    return sequences


def _sources(request: BuildRequest, part: int) -> tuple[Iterator[Demonstration], Iterator[Demonstration]]:
    seed = request.recipe.seed * _NUM_PARTS + part
    return demonstrations(seed, request.mixture, request.max_turns), exercises(seed)


def _write_tokenizer(request: BuildRequest) -> int:
    """Train the tokenizer on what the first part begins with; returns its number of tokens."""
    directory = Path(request.directory)
    template = files("steelyard.gateway").joinpath("templates/chatml_hermes.jinja").read_text(encoding="utf-8")
    samples = [one for source in _sources(request, 0) for one in itertools.islice(source, _NUM_TOKENIZER_TEXTS)]
    # A tokenizer without any merges is enough to see the examples as the template writes them.
    write_quick_tokenizer(directory, [], template, _NO_MERGES)
    renderer = Renderer.load(directory)
    texts = [demonstration_text(renderer, sample) for sample in samples]
    return write_quick_tokenizer(directory, texts, template, request.recipe.vocab_size)


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
