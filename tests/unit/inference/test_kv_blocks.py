"""Bookkeeping of the key-value cache: space, prefixes, versions, eviction."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from steelyard.errors import EngineError
from steelyard.inference.kv_blocks import Admitted, BlockTable, Copy, SequenceInfo, Wait

BLOCK = 4


def table(num_rows: int = 4, row_tokens: int = 32, capacity_tokens: int = 128) -> BlockTable:
    return BlockTable(num_rows=num_rows, row_tokens=row_tokens, capacity_tokens=capacity_tokens, block_tokens=BLOCK)


def info(
    blocks: BlockTable, name: str, prompt: tuple[int, ...], *, version: int = 0, new: int = 4, key: str | None = None
) -> SequenceInfo:
    return SequenceInfo(
        sequence_id=name,
        sequence_key=key or name,
        attempt_id=key or name,
        version=version,
        prompt=prompt,
        projected_tokens=len(prompt) + new,
        max_tokens=len(prompt) + new,
        chain=blocks.chain(prompt),
    )


def run(blocks: BlockTable, one: SequenceInfo, generated: tuple[int, ...] = ()) -> Admitted | Wait:
    """Admit, compute and retain a sequence."""
    admitted = blocks.admit(one)
    if isinstance(admitted, Admitted):
        blocks.mark_ready(one.sequence_id, len(one.prompt))
        blocks.retain(one.sequence_id, one.prompt + generated)
    return admitted


def test_the_next_turn_of_a_conversation_continues_in_place() -> None:
    blocks = table()
    run(blocks, info(blocks, "turn1", (1, 2, 3, 4, 5), key="talk"), (6, 7))
    second = info(blocks, "turn2", (1, 2, 3, 4, 5, 6, 7, 8, 9), key="talk")
    assert blocks.admit(second) == Admitted(7)
    assert blocks.take_copies() == []


def test_a_sibling_copies_an_equal_prompt_but_computes_its_last_token() -> None:
    blocks = table()
    prompt = (1, 2, 3, 4, 5, 6, 7, 8)
    run(blocks, info(blocks, "one", prompt))
    assert blocks.admit(info(blocks, "two", prompt)) == Admitted(7)
    assert blocks.take_copies() == [Copy(source_row=0, target_row=1, num_tokens=7)]


def test_an_equal_prefix_on_another_version_is_never_reused() -> None:
    blocks = table()
    prompt = (1, 2, 3, 4, 5, 6, 7, 8)
    run(blocks, info(blocks, "old", prompt, version=1, key="talk"))
    assert blocks.admit(info(blocks, "new", (*prompt, 9), version=2, key="talk")) == Admitted(0)
    assert blocks.take_copies() == []


def test_a_sibling_waits_while_its_prefix_is_being_computed() -> None:
    blocks = table()
    prompt = (1, 2, 3, 4, 5, 6, 7, 8)
    blocks.admit(info(blocks, "one", prompt))
    two = info(blocks, "two", prompt)
    assert blocks.admit(two) is Wait.SHARED_PREFIX
    blocks.mark_ready("one", len(prompt))
    assert blocks.admit(two) == Admitted(7)


def test_a_sibling_does_not_wait_for_one_that_was_discarded() -> None:
    blocks = table()
    prompt = (1, 2, 3, 4, 5, 6, 7, 8)
    blocks.admit(info(blocks, "one", prompt))
    blocks.discard("one")
    assert blocks.admit(info(blocks, "two", prompt)) == Admitted(0)


def test_edited_history_reuses_only_what_is_still_equal() -> None:
    blocks = table()
    run(blocks, info(blocks, "turn1", (1, 2, 3, 4, 5, 6), key="talk"))
    assert blocks.admit(info(blocks, "turn2", (1, 2, 3, 9, 9, 9), key="talk")) == Admitted(3)


def test_the_least_recently_used_sequence_is_evicted_whole() -> None:
    blocks = table(num_rows=2)
    run(blocks, info(blocks, "old", (1, 1, 1, 1, 1)))
    run(blocks, info(blocks, "young", (2, 2, 2, 2, 2)))
    assert run(blocks, info(blocks, "third", (3, 3, 3, 3, 3))) == Admitted(0)
    assert run(blocks, info(blocks, "again", (2, 2, 2, 2, 2))) == Admitted(4), "the younger one must be left"


def test_no_space_changes_nothing() -> None:
    blocks = table(capacity_tokens=32)
    run(blocks, info(blocks, "kept", (5, 5, 5, 5, 5), new=0))
    blocks.admit(info(blocks, "busy", tuple(range(10, 26)), new=4))
    before = blocks.tokens_in_use
    assert blocks.admit(info(blocks, "large", tuple(range(40, 60)), new=4)) is Wait.NO_SPACE
    assert blocks.tokens_in_use == before
    assert blocks.admit(info(blocks, "small", (5, 5, 5, 5, 5), new=1)) == Admitted(4), (
        "what was kept must still be there"
    )


def test_a_released_attempt_leaves_nothing_now_or_later() -> None:
    blocks = table()
    run(blocks, info(blocks, "turn1", (1, 2, 3, 4, 5), key="talk"))
    blocks.admit(info(blocks, "turn2", (9, 9, 9), key="talk"))
    blocks.release_attempt("talk")
    blocks.retain("turn2", (9, 9, 9))
    assert blocks.tokens_in_use == 0


def test_a_version_in_use_cannot_be_dropped() -> None:
    blocks = table()
    blocks.admit(info(blocks, "busy", (1, 2, 3), version=7))
    with pytest.raises(EngineError, match="version 7 must have no running sequence, got busy"):
        blocks.drop_version(7)
    blocks.retain("busy", (1, 2, 3))
    blocks.drop_version(7)
    assert blocks.tokens_in_use == 0


def test_compacting_fills_holes_with_the_last_rows() -> None:
    blocks = table()
    for index in range(4):
        blocks.admit(info(blocks, f"s{index}", (index, index)))
    blocks.discard("s1")
    blocks.take_copies()
    blocks.compact(2, lambda _: 2)
    assert blocks.rows_of(["s0", "s3", "s2"]) == [0, 1, 2]
    assert blocks.take_copies() == [Copy(source_row=3, target_row=1, num_tokens=2)]


def test_equal_hashes_of_different_tokens_are_told_apart() -> None:
    blocks = table()
    one = info(blocks, "one", (1, 2, 3, 4, 5))
    run(blocks, one)
    forged = SequenceInfo("two", "two", "two", 0, (9, 9, 9, 9, 5), 6, 6, one.chain)
    assert blocks.admit(forged) == Admitted(0)


class CacheMachine(RuleBasedStateMachine):
    """Random admissions and ends, with a model of what each row holds that follows the copies and the writes."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = table(num_rows=5, row_tokens=24, capacity_tokens=80)
        self.content: dict[int, list[tuple[int, int]]] = {row: [(-1, -1)] * 24 for row in range(5)}
        self.held: dict[str, SequenceInfo] = {}
        self.ready: dict[str, int] = {}
        self.number = 0

    def apply_copies(self) -> None:
        for copy in self.blocks.take_copies():
            self.content[copy.target_row][: copy.num_tokens] = self.content[copy.source_row][: copy.num_tokens]

    def write(self, name: str, tokens: tuple[int, ...], start: int) -> None:
        (row,) = self.blocks.rows_of([name])
        for position in range(start, len(tokens)):
            self.content[row][position] = (self.held[name].version, tokens[position])

    @rule(
        target=running,
        stem=st.integers(0, 2),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        version=st.integers(0, 1),
        key=st.integers(0, 3),
        computed=st.booleans(),
    )
    def admit(self, stem: int, tail: list[int], version: int, key: int, computed: bool) -> object:
        self.number += 1
        name = f"s{self.number}"
        one = info(self.blocks, name, (*([stem] * 8), *tail), version=version, new=6, key=f"key{key}")
        before = self.blocks.tokens_in_use
        admitted = self.blocks.admit(one)
        if not isinstance(admitted, Admitted):
            assert self.blocks.tokens_in_use == before
            return multiple()
        self.apply_copies()
        self.held[name] = one
        (row,) = self.blocks.rows_of([name])
        expected = [(version, token) for token in one.prompt[: admitted.num_cached]]
        assert self.content[row][: admitted.num_cached] == expected, "cached must be the prompt, of its version"
        assert admitted.num_cached < len(one.prompt)
        self.ready[name] = admitted.num_cached
        if computed:
            self.write(name, one.prompt, admitted.num_cached)
            self.blocks.mark_ready(name, len(one.prompt))
            self.ready[name] = len(one.prompt)
        return name

    @rule(name=consumes(running), generated=st.lists(st.integers(0, 1), max_size=5))
    def retain(self, name: str, generated: list[int]) -> None:
        tokens = (*self.held[name].prompt, *generated)
        self.write(name, tokens, self.ready[name])
        self.blocks.retain(name, tokens)
        del self.held[name]

    @rule(name=consumes(running))
    def discard(self, name: str) -> None:
        self.blocks.discard(name)
        del self.held[name]

    @rule(key=st.integers(0, 3))
    def release(self, key: int) -> None:
        self.blocks.release_attempt(f"key{key}")

    @rule()
    def compact(self) -> None:
        self.blocks.compact(1, lambda name: self.ready[name])
        self.apply_copies()

    @rule(version=st.integers(0, 1))
    def drop_version(self, version: int) -> None:
        if all(one.version != version for one in self.held.values()):
            self.blocks.drop_version(version)

    @invariant()
    def books_close(self) -> None:
        assert list(self.blocks.check()) == []
        assert self.blocks.tokens_in_use <= self.blocks.capacity_tokens
        rows = self.blocks.rows_of(list(self.held))
        assert len(set(rows)) == len(rows), "no row is used twice"

    def teardown(self) -> None:
        for name in list(self.held):
            self.blocks.discard(name)
        for version in (0, 1):
            self.blocks.drop_version(version)
        assert self.blocks.tokens_in_use == 0, "nothing may leak"


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
