"""Calls, bursts of them, and optimizer steps that are made up and timed."""

import asyncio
import random
import time
from pathlib import Path

from steelyard.allocation.calibration import Burst, TrainStep
from steelyard.assembly.batch import build_step_batch, encode_step_batch
from steelyard.clock import SystemClock
from steelyard.durable import remove_directory
from steelyard.errors import RunError
from steelyard.inference.engine import KvRule
from steelyard.run.one_replica import REPLICA, OneReplica
from steelyard.trainer.records import TrainRequest
from steelyard.types import FinishReason, GenerateRequest, GenerateResult, Sampling, TrainingSample

CALL_DEADLINE_S = 600.0
_PROMPT_FRAC = 0.5
_TEMPERATURE = 1.0


class Calls:
    """Makes model calls of given lengths, with random prompts; every attempt and call has a name of its own."""

    def __init__(self, one: OneReplica, vocab_size: int, seed: int) -> None:
        self._one = one
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._num_attempts = 0
        self._clock = SystemClock()

    def new_attempt(self) -> str:
        """A name."""
        self._num_attempts += 1
        return f"measured_{self._num_attempts}"

    def tokens(self, number: int) -> tuple[int, ...]:
        """Random token ids."""
        return tuple(self._rng.choices(range(self._vocab_size), k=number))

    async def call(self, attempt_id: str, turn: int, context: tuple[int, ...], new_tokens: int) -> GenerateResult:
        """Exactly ``new_tokens`` tokens after ``context``.

        Raises:
            RunError: it gave others.
        """
        request = GenerateRequest(
            request_id=f"{attempt_id}.{turn}",
            attempt_id=attempt_id,
            sequence_key=attempt_id,
            policy_version=self._one.version,
            prompt_token_ids=context,
            sampling=Sampling(temperature=_TEMPERATURE, max_tokens=new_tokens),
            stop_token_ids=(),
            deadline_at_s=self._clock.now_s() + CALL_DEADLINE_S,
        )
        result = await self._one.router.generate(request)
        if result.finish_reason is not FinishReason.LENGTH or len(result.token_ids) != new_tokens:
            raise RunError(
                f"a measured call must give {new_tokens} tokens, got {len(result.token_ids)} "
                f"({result.finish_reason}{': ' * bool(result.detail)}{result.detail})"
            )
        return result

    async def burst(self, work: Burst) -> float:
        """Seconds until the last of equal calls has ended that begin at once."""
        prompts = [(self.new_attempt(), self.tokens(work.prompt_tokens)) for _ in range(work.num_calls)]
        started_s = time.perf_counter()
        await asyncio.gather(*(self.call(name, 0, prompt, work.new_tokens) for name, prompt in prompts))
        took_s = time.perf_counter() - started_s
        await asyncio.gather(*(self._one.router.release(name) for name, _ in prompts))
        return took_s


async def train_and_publish(one: OneReplica, work: TrainStep, vocab_size: int, folder: Path) -> float:
    """Take an optimizer step, publish its version and go over to it; returns the seconds of the step alone."""
    state = await one.trainer.state()
    rng = random.Random(state.step)
    samples = [_sample(rng, index, work.row_tokens, vocab_size) for index in range(work.num_rows)]
    micro_batch_tokens = max(one.config.train.micro_batch_tokens, work.row_tokens)
    data, digest = encode_step_batch(build_step_batch(state.step, state.version, samples, micro_batch_tokens))
    path = folder / "measured_batch"
    path.write_bytes(data)
    version = state.version + 1
    report = await one.trainer.train_step(TrainRequest(path=str(path), digest=digest, step=state.step, version=version))
    one.write_s.append(await one.publish())
    started_s = time.perf_counter()
    await one.router.replicas[REPLICA].update(str(one.directory.version(version)), version, KvRule.RECOMPUTE)
    one.load_s.append(time.perf_counter() - started_s)
    remove_directory(one.directory.version(one.version))
    one.version = version
    return report.duration_s


def _sample(rng: random.Random, index: int, num_tokens: int, vocab_size: int) -> TrainingSample:
    """Half of it prompt, half of it sampled; log-probabilities near those of a policy that knows nothing."""
    num_prompt = max(1, int(num_tokens * _PROMPT_FRAC))
    mask = (0,) * num_prompt + (1,) * (num_tokens - num_prompt)
    return TrainingSample(
        attempt_id=f"measured_{index}",
        segment_index=0,
        token_ids=tuple(rng.choices(range(vocab_size), k=num_tokens)),
        loss_mask=mask,
        logprobs=tuple(-7.0 * bit for bit in mask),
        versions=tuple(0 if bit else -1 for bit in mask),
        advantage=rng.choice((-1.0, 1.0)),
        temperature=_TEMPERATURE,
    )
