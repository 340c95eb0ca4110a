"""What the simulator says that the local engine reads, beside what its scheduler and its rows give, counted."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.inference.kv_blocks import BlockTable
from steelyard.inference.kv_ranges import RANGE_TOKENS, split_by_length
from steelyard.inference.scheduler import Batch, Sampled, Scheduler
from steelyard.sim.padded_reads import padded_tokens, place
from steelyard.types import GenerateRequest, Sampling

Turn = tuple[int, int, int]
"""Prompt tokens, sampled tokens, steps that its tool takes."""
Draw = Callable[[random.Random], int]


@dataclass
class Engine:
    """The local engine without its tensors, and the tokens that its steps read, both ways counted."""

    trajectories: list[list[Turn]]
    read: int = 0
    predicted: int = 0
    own: int = 0
    step: int = 0
    due: list[tuple[int, int, int]] = field(default_factory=list)
    contexts: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def run(self) -> None:
        rng, num_open = random.Random(0), len(self.trajectories)
        blocks = BlockTable(num_rows=128, row_tokens=1024, capacity_tokens=131_072)
        scheduler = Scheduler(blocks, max_running=64, prefill_chunk_tokens=512)
        self.due = [(0, index, 0) for index in range(num_open)]
        while num_open:
            while self.due and self.due[0][0] <= self.step:
                scheduler.add(self.request(*heapq.heappop(self.due)[1:], rng), 0.0)
            for batch in scheduler.plan(0.0):
                blocks.take_copies()
                self.count(batch, blocks)
                num = sum(item.is_sampled for item in batch.items)
                scheduler.commit(batch, Sampled([1] * num, [-1.0] * num, [0.0] * num), 0.0)
            for finished in scheduler.take_finished():
                index, turn = map(int, finished.state.info.sequence_id.split("."))
                self.contexts[index] = (*finished.state.request.prompt_token_ids, *finished.state.token_ids)
                if turn + 1 < len(self.trajectories[index]):
                    back = self.step + 1 + self.trajectories[index][turn][2]
                    heapq.heappush(self.due, (back, index, turn + 1))
                else:
                    scheduler.release(str(index))
                    num_open -= 1
            self.step += 1

    def request(self, index: int, turn: int, rng: random.Random) -> GenerateRequest:
        prompt, new, _ = self.trajectories[index][turn]
        return GenerateRequest(
            request_id=f"{index}.{turn}", attempt_id=str(index), sequence_key=str(index), policy_version=0,
            prompt_token_ids=(*self.contexts.get(index, ()), *rng.choices(range(1024), k=prompt)),
            sampling=Sampling(temperature=1.0, max_tokens=new), stop_token_ids=(), deadline_at_s=1e9,
        )  # fmt: skip

    def count(self, batch: Batch, blocks: BlockTable) -> None:
        items = [item for item in batch.items if len(item.token_ids) == 1]
        if not items:
            return
        rows = blocks.rows_of([item.sequence_id for item in items])
        lengths = {row: item.start + 1 for row, item in zip(rows, items, strict=True)}
        num_ranges = 0
        for stretch in stretches(sorted(rows)):
            part = np.array([lengths[row] for row in stretch])
            ranges = split_by_length(part)
            self.read += sum((end - start) * int(part[start:end].max()) for start, end in ranges)
            num_ranges += len(ranges)
        self.read += (num_ranges - 1) * RANGE_TOKENS
        self.own += sum(lengths.values())
        held = {int(item.sequence_id.split(".")[0]): item.start + 1 for item in items}
        order = sorted(held, key=place)
        num_kept = sum(not held_row.is_running for held_row in blocks._by_row.values())
        self.predicted += padded_tokens([held[index] for index in order], num_kept, RANGE_TOKENS)


def stretches(rows: list[int]) -> list[list[int]]:
    """Rows without a gap."""
    found = [[rows[0]]]
    for row in rows[1:]:
        if row == found[-1][-1] + 1:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def between(low: int, high: int) -> Draw:
    return lambda rng: round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))


@pytest.mark.parametrize(
    ("num", "num_turns", "prompt", "new", "tool"),
    [
        (64, 1, between(64, 64), between(64, 64), between(1, 1)),
        (192, 1, between(64, 64), between(8, 192), between(1, 1)),
        (48, 1, between(16, 800), between(48, 48), between(1, 1)),
        (64, 4, between(48, 48), between(32, 32), between(20, 100)),
        (96, 3, between(8, 64), between(16, 80), between(8, 80)),
    ],
)
def test_the_simulator_counts_within_15_per_cent_what_the_engine_reads(
    num: int, num_turns: int, prompt: Draw, new: Draw, tool: Draw
) -> None:
    rng = random.Random(1)
    engine = Engine([[(prompt(rng), new(rng), tool(rng)) for _ in range(num_turns)] for _ in range(num)])
    engine.run()
    # Both are draws of one random order of rows.
    assert engine.predicted == pytest.approx(engine.read, rel=0.15)
    assert engine.read >= engine.own


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=80), st.integers(0, 80), st.integers(1, 4000))
def test_padding_never_reads_less_than_what_is_there(lengths: list[int], num_kept: int, range_tokens: int) -> None:
    read = padded_tokens(lengths, num_kept, range_tokens)
    assert read >= sum(lengths)
    assert padded_tokens([], num_kept, range_tokens) == 0
    assert padded_tokens([max(lengths)] * len(lengths), 0, range_tokens) == max(lengths) * len(lengths)
