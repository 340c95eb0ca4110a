"""Agents of growing context on a scheduler alone, on virtual time: what is computed, and that all come to an end."""

import heapq
import random
from dataclasses import dataclass, field

import pytest

from steelyard.inference.kv_blocks import BlockTable
from steelyard.inference.scheduler import Batch, Sampled, Scheduler
from steelyard.testing.versions import request_for
from steelyard.types import FinishReason

NUM_AGENTS, NUM_EPISODES, NUM_TURNS = 32, 2, 6
PROMPT_TOKENS, ANSWER_TOKENS = 100, 40
CONTEXT_TOKENS = NUM_TURNS * (PROMPT_TOKENS + ANSWER_TOKENS)
NEW_TOKENS = NUM_AGENTS * NUM_EPISODES * NUM_TURNS * PROMPT_TOKENS


@dataclass
class Cost:
    """Seconds of a step, and of each token in it; the tool takes from ``tool_s`` to seven times that."""

    step_s: float = 0.002
    decode_s: float = 0.0003
    prefill_s: float = 0.0002
    tool_s: float = 0.05

    def of(self, batches: list[Batch]) -> float:
        sizes = [len(item.token_ids) for batch in batches for item in batch.items]
        return self.step_s + sum(self.decode_s if size == 1 else self.prefill_s * size for size in sizes)


@dataclass
class Agents:
    """All agents, each with its episode, turn and context."""

    scheduler: Scheduler
    cost: Cost
    max_tokens: int = ANSWER_TOKENS
    now_s: float = 0.0
    wakes: list[tuple[float, int]] = field(default_factory=list)

    def play(self) -> float:
        """To the end; seconds that it took."""
        self.rngs = [random.Random(index) for index in range(NUM_AGENTS)]
        self.places = [(0, 0)] * NUM_AGENTS
        self.contexts: list[tuple[int, ...]] = [()] * NUM_AGENTS
        self.wakes = [(0.0, index) for index in range(NUM_AGENTS)]
        while self.wakes or self.scheduler.num_running + self.scheduler.num_waiting:
            while self.wakes and self.wakes[0][0] <= self.now_s:
                self._wake(heapq.heappop(self.wakes)[1])
            batches = self.scheduler.plan(self.now_s)
            if batches:
                self._compute(batches)
            elif self.wakes:
                self.now_s = self.wakes[0][0]
            else:
                assert not self.scheduler.num_waiting, "somebody waits, and nothing runs"
        return self.now_s

    def _wake(self, index: int) -> None:
        episode, turn = self.places[index]
        if turn == NUM_TURNS:
            self.scheduler.release(f"a{index}_{episode}")
            episode, turn = self.places[index] = (episode + 1, 0)
            self.contexts[index] = ()
        if episode < NUM_EPISODES:
            self.contexts[index] += tuple(self.rngs[index].randrange(1024) for _ in range(PROMPT_TOKENS))
            name, key = f"{index}:{episode}:{turn}", f"a{index}_{episode}"
            request = request_for(name, self.contexts[index], max_tokens=self.max_tokens, key=key, stop=(-1,))
            self.scheduler.add(request, self.now_s)

    def _compute(self, batches: list[Batch]) -> None:
        self.now_s += self.cost.of(batches)
        for batch in batches:
            ends = [item for item in batch.items if item.is_sampled]
            tokens = [self._token(item.sequence_id, item.start + len(item.token_ids)) for item in ends]
            self.scheduler.commit(batch, Sampled(tokens, [-1.0] * len(ends), [0.0] * len(ends)), self.now_s)
        for finished in self.scheduler.take_finished():
            assert finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
            index = int(finished.state.info.sequence_id.split(":")[0])
            self.contexts[index] += tuple(finished.state.token_ids)
            self.places[index] = (self.places[index][0], self.places[index][1] + 1)
            tool_s = self.rngs[index].uniform(self.cost.tool_s, 7 * self.cost.tool_s)
            heapq.heappush(self.wakes, (self.now_s + tool_s, index))

    def _token(self, sequence_id: str, place: int) -> int:
        """Any token; the stop token at the end of an answer that may be longer."""
        index = int(sequence_id.split(":")[0])
        return -1 if place == len(self.contexts[index]) + ANSWER_TOKENS - 1 else place % 5


def scheduler(capacity_tokens: int, step_tokens: int = 16) -> Scheduler:
    blocks = BlockTable(num_rows=2 * NUM_AGENTS, row_tokens=1024, capacity_tokens=capacity_tokens)
    return Scheduler(blocks, max_running=NUM_AGENTS, prefill_chunk_tokens=512, step_tokens=step_tokens)


HALF = NUM_AGENTS * CONTEXT_TOKENS // 2


def test_with_room_for_all_nothing_is_computed_twice() -> None:
    one = scheduler(NUM_AGENTS * 1024)
    Agents(one, Cost()).play()
    assert one.prefill_tokens == pytest.approx(NEW_TOKENS, rel=0.02), "and the last token of each answer"
    assert one.num_evicted == 0


def test_with_room_for_half_little_is_computed_twice_and_little_time_is_lost() -> None:
    ample, half = scheduler(NUM_AGENTS * 1024), scheduler(HALF)
    ample_s, half_s = Agents(ample, Cost()).play(), Agents(half, Cost()).play()
    assert half.prefill_tokens <= 1.3 * NEW_TOKENS
    assert half_s <= ample_s / 0.8


def test_an_engine_that_would_idle_while_tools_run_lets_others_in_and_computes_again() -> None:
    cost = Cost(step_s=0.02, decode_s=0.0001, prefill_s=0.00005, tool_s=1.0)
    ample, patient, eager = scheduler(NUM_AGENTS * 1024, 400), scheduler(HALF, 1), scheduler(HALF, 400)
    ample_s, patient_s, eager_s = (Agents(one, cost).play() for one in (ample, patient, eager))
    assert eager.prefill_tokens > patient.prefill_tokens
    assert eager_s < patient_s
    assert eager_s <= ample_s / 0.8


def test_wrong_projections_evict_and_everybody_still_ends() -> None:
    one = scheduler(HALF // 4, step_tokens=1_000_000)
    for index in range(20):
        one.add(request_for(f"short{index}", (1,), max_tokens=400, stop=(7,)), 0.0)
        for batch in one.plan(0.0):
            one.commit(batch, Sampled([7], [-1.0], [0.0]), 0.0)
        one.release(f"short{index}")
    one.take_finished()
    Agents(one, Cost(tool_s=0.0), max_tokens=4 * ANSWER_TOKENS).play()
    assert one.num_evicted > 0
