"""The cache's attention against a plain computation, over ragged batches in scattered rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from steelyard.errors import EngineError
from steelyard.inference.kv_blocks import Admitted, BlockTable, SequenceInfo
from steelyard.inference.kv_cache import KVCache, KVLayout, KVShape, Part, cached_attention
from steelyard.inference.kv_ranges import split_by_length

HEADS, KV_HEADS, DIM, ROW = 4, 2, 8, 320


class Rig:
    """One layer's cache, and beside it every sequence's keys and values in plain lists."""

    def __init__(self, num_rows: int = 6) -> None:
        self.blocks = BlockTable(num_rows=num_rows, row_tokens=ROW, capacity_tokens=num_rows * ROW)
        shape = KVShape(1, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
        self.cache = KVCache(self.blocks, shape)
        self.generator = torch.Generator().manual_seed(0)
        self.keys: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        self.layer = torch.nn.Module()
        self.layer.layer_idx = 0  # type: ignore[assignment]

    def admit(self, name: str) -> None:
        info = SequenceInfo(name, name, name, 0, (hash(name) % 1000,), ROW, ROW, ())
        assert self.blocks.admit(info) == Admitted(0)
        self.keys[name] = self.values[name] = torch.empty(KV_HEADS, 0, DIM)

    def random(self, *dims: int) -> Tensor:
        return torch.randn(*dims, generator=self.generator)

    def step(self, sizes: dict[str, int]) -> None:
        """Feed ``sizes`` new tokens to each sequence, and compare every output with the plain one."""
        parts = [Part(name, self.keys[name].shape[1], size) for name, size in sizes.items()]
        layout = self.cache.lay_out(parts)
        total = sum(sizes.values())
        query, key, value = (self.random(1, heads, total, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        found, _ = cached_attention(self.layer, query, key, value, None, kv_layout=layout)
        first = 0
        for index in layout.order:
            part = parts[index]
            here = slice(first, first + part.num_tokens)
            first += part.num_tokens
            assert layout.ends[index] == first - 1
            assert layout.positions[here].tolist() == list(range(part.start, part.start + part.num_tokens))
            name = part.sequence_id
            self.keys[name] = torch.cat((self.keys[name], key[0, :, here]), 1)
            self.values[name] = torch.cat((self.values[name], value[0, :, here]), 1)
            torch.testing.assert_close(found[0, here], self.plain(name, query[0, :, here]), atol=1e-5, rtol=1e-5)

    def plain(self, name: str, query: Tensor) -> Tensor:
        """Causal attention of the last tokens of a sequence, [num_tokens, heads, dim]."""
        keys, values = (one[name].repeat_interleave(HEADS // KV_HEADS, 0) for one in (self.keys, self.values))
        scores = query @ keys.transpose(1, 2) / DIM**0.5
        num_queries, num_keys = query.shape[1], keys.shape[1]
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
        expected: Tensor = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
        return expected.transpose(0, 1)


def test_prompts_longer_than_a_piece_and_single_tokens_share_a_pass() -> None:
    rig = Rig()
    for name in "abcd":
        rig.admit(name)
    rig.step({"a": 300, "b": 1, "c": 129})
    rig.step({"b": 1, "a": 2, "c": 128, "d": 5})
    rig.step({"d": 1, "c": 1, "b": 1, "a": 1})
    rig.step({"d": 1, "c": 1, "b": 1, "a": 1})


def test_holes_and_moved_rows_change_nothing() -> None:
    rig = Rig()
    for name in "abcdef":
        rig.admit(name)
    rig.step(dict.fromkeys("abcdef", 20))
    rig.step(dict.fromkeys("abcdef", 1))
    for name in "be":
        rig.blocks.discard(name)
    rig.step(dict.fromkeys("acdf", 1))
    rig.blocks.compact(2, lambda name: rig.keys[name].shape[1])
    rig.step(dict.fromkeys("acdf", 1))
    rig.admit("g")
    rig.step({"g": 7, **dict.fromkeys("acdf", 1)})


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([1, 1, 1, 3, 40]), min_size=1), max_size=6
    )
)
def test_every_ragged_batch_gives_what_each_sequence_gives_alone(steps: list[dict[str, int]]) -> None:
    rig = Rig()
    for name in "abcdef":
        rig.admit(name)
    for sizes in steps:
        rig.step(sizes)


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=80))
def test_cuts_cover_all_rows_and_never_cost_more_than_none(lengths: list[int]) -> None:
    array = np.array(lengths)
    ranges = split_by_length(array)
    assert [row for start, end in ranges for row in range(start, end)] == list(range(len(lengths)))
    read = sum((end - start) * int(array[start:end].max()) for start, end in ranges)
    assert read + 1024 * (len(ranges) - 1) <= len(lengths) * max(lengths)


def test_a_few_long_rows_among_short_ones_are_cut_off() -> None:
    assert split_by_length(np.array([100] * 30 + [900] * 2 + [100] * 30)) == [(0, 30), (30, 32), (32, 62)]
    assert split_by_length(np.array([100, 101, 102])) == [(0, 3)]


def layout_of(rig: Rig) -> KVLayout:
    rig.admit("a")
    return rig.cache.lay_out([Part("a", 0, 2)])


def test_other_kinds_of_attention_are_refused_by_name() -> None:
    rig = Rig()
    layout = layout_of(rig)
    tensors = (rig.random(1, HEADS, 2, DIM), rig.random(1, KV_HEADS, 2, DIM), rig.random(1, KV_HEADS, 2, DIM))
    with pytest.raises(EngineError, match="full causal attention only, but got sliding_window"):
        cached_attention(rig.layer, *tensors, None, kv_layout=layout, sliding_window=8)
    with pytest.raises(EngineError, match="must get kv_layout, no attention_mask"):
        cached_attention(rig.layer, *tensors, None)
    with pytest.raises(EngineError, match="must get kv_layout, no attention_mask"):
        cached_attention(rig.layer, *tensors, torch.zeros(2, 2), kv_layout=layout)


def test_a_sequence_without_space_cannot_be_laid_out() -> None:
    with pytest.raises(EngineError, match="sequence 'ghost' must be running"):
        Rig().cache.lay_out([Part("ghost", 0, 1)])
