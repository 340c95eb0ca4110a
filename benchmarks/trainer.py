"""What an optimizer step costs beside the bare forward and backward over the same rows.

A step is all that ``Trainer.train_step`` does: it reads the batch file and checks its digest, computes
log-probabilities, loss, metrics and gradients, clips, takes the AdamW step and digests the new weights. The bare run is
the same module's own forward over the same right-padded rows, and a backward from the mean of its logits. It is
measured in two ways: with the head on all tokens, as ``transformers`` runs it ("bare", which the floor is about), and
with the head on the sampled tokens alone ("bare, head on sampled tokens"), which is the harder measure.

Both run in one process with one torch thread, in turns (A B C, A B C, ...); each ratio is of one turn, and medians are
of ratios. Tokens are real ones; padding does not count.

    python benchmarks/trainer.py            the quick policy's shape, 7 turns
    python benchmarks/trainer.py --check    the same; exit code 1 below the floor of floors.toml
    python benchmarks/trainer.py --quick    3 turns
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import torch

from steelyard.assembly.batch import build_step_batch, encode_step_batch
from steelyard.testing.tokenizer import chatml_hermes_template
from steelyard.testing.training_data import make_sample
from steelyard.trainer.model import load_model, logits_at
from steelyard.trainer.quick_policy import new_quick_module
from steelyard.trainer.quick_recipe import QuickPolicyRecipe, write_quick_tokenizer
from steelyard.trainer.records import TrainerSettings, TrainRequest
from steelyard.trainer.step import Rows, read_rows
from steelyard.trainer.trainer import Trainer
from steelyard.types import StepBatch, TrainingSample
from steelyard.weights.publisher import VersionPublisher

MIN_REAL_TOKENS = 16_384
MICRO_BATCH_TOKENS = 8192
FLOORS = Path(__file__).parent / "floors.toml"


def main() -> int:
    """Run, print a table, and compare with the floor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 below the floor")
    parser.add_argument("--quick", action="store_true", help="3 turns instead of 7")
    arguments = parser.parse_args()
    floor = tomllib.loads(FLOORS.read_text())["trainer"]["min_step_frac_of_bare"]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        frac = asyncio.run(measure(Path(directory), num_turns=3 if arguments.quick else 7))
    is_good = frac >= floor
    print(f"floor {floor}: {'reached' if is_good else 'MISSED'}")
    return 0 if is_good or not arguments.check else 1


def conversations(seed: int, vocab_size: int) -> list[TrainingSample]:
    """Samples shaped like those of ``repair``: a prompt of about 150 tokens, then two to six turns of about 20 sampled
    and 20 given tokens. The log-probabilities are near those of a random model, so that few ratios are clipped."""
    rng = random.Random(seed)
    samples: list[TrainingSample] = []
    while sum(len(sample.token_ids) for sample in samples) < MIN_REAL_TOKENS:
        mask = [0] * rng.randint(120, 180)
        for _ in range(rng.randint(2, 6)):
            mask += [1] * rng.randint(12, 32) + [0] * rng.randint(10, 40)
        token_ids = [rng.randrange(vocab_size) for _ in mask]
        logprobs = [-7.0 * bit for bit in mask]
        name = f"att_{len(samples)}"
        samples.append(make_sample(token_ids, mask, attempt_id=name, advantage=rng.choice((-1, 1)), logprobs=logprobs))
    return samples


async def measure(directory: Path, num_turns: int) -> float:
    """Median over turns of (tokens/s of a step) / (tokens/s of the bare forward and backward)."""
    model_dir = directory / "model"
    model_dir.mkdir()
    recipe = QuickPolicyRecipe()
    num_tokens = write_quick_tokenizer(model_dir, ["a b c"], chatml_hermes_template(), recipe.vocab_size)
    module = new_quick_module(recipe, max(num_tokens, recipe.vocab_size))
    module.save_pretrained(model_dir)  # type: ignore[operator]
    settings = TrainerSettings(checkpoints_dir=str(directory / "checkpoints"))
    publisher = VersionPublisher(directory / "weights", model_dir, 1e-4)
    trainer = await Trainer.open(settings, publisher, model_dir=model_dir)
    bare = load_model(model_dir)
    samples = conversations(0, num_tokens)
    num_real = sum(len(sample.token_ids) for sample in samples)
    batches = [build_step_batch(step, step, samples, MICRO_BATCH_TOKENS) for step in range(num_turns + 1)]
    padded = sum(m.num_rows * m.num_columns for m in batches[0].micro_batches)
    print(f"{num_real} real tokens, {padded} with padding, in {len(batches[0].micro_batches)} micro-batches")
    ratios: list[tuple[float, float]] = []
    for step, batch in enumerate(batches):
        seconds = await one_turn(directory, trainer, bare, batch, step)
        if step:  # the first turn warms up
            ratios.append((seconds["bare"] / seconds["step"], seconds["head"] / seconds["step"]))
            print("  ".join(f"{name} {num_real / s:,.0f} tokens/s" for name, s in seconds.items()))
    await trainer.close()
    of_bare = statistics.median(ratio for ratio, _ in ratios)
    of_head = statistics.median(ratio for _, ratio in ratios)
    print(f"step / bare: {of_bare:.3f}   step / bare, head on sampled tokens: {of_head:.3f}")
    return of_bare


async def one_turn(
    directory: Path, trainer: Trainer, bare: torch.nn.Module, batch: StepBatch, step: int
) -> dict[str, float]:
    """Seconds of a whole step, of the bare run, and of the bare run with the head on sampled tokens."""
    data, digest = encode_step_batch(batch)
    path = directory / "batch"
    path.write_bytes(data)
    parts = [read_rows(micro_batch, batch.parent_version) for micro_batch in batch.micro_batches]
    started_s = time.perf_counter()
    await trainer.train_step(TrainRequest(path=str(path), digest=digest, step=step, version=step + 1))
    step_s = time.perf_counter() - started_s
    return {
        "step": step_s,
        "bare": forward_backward(bare, parts, lambda part: bare(input_ids=part.token_ids, use_cache=False).logits),
        "head": forward_backward(bare, parts, lambda part: logits_at(bare, part.token_ids, part.positions)),
    }


def forward_backward(module: torch.nn.Module, parts: list[Rows], logits_of: Callable[[Rows], torch.Tensor]) -> float:
    """Seconds of a forward and backward over all rows; gradients add up, as in a step."""
    module.zero_grad(set_to_none=False)
    started_s = time.perf_counter()
    for part in parts:
        torch.autograd.backward(logits_of(part).mean())
    return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(main())
