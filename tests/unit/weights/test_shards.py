"""How tensors are spread over files."""

import json

from hypothesis import given
from hypothesis import strategies as st

from steelyard.weights.shards import INDEX_NAME, WEIGHTS_NAME, encode_index, plan_shards

SIZES = st.dictionaries(st.text("abc", min_size=1, max_size=6), st.integers(0, 50), min_size=1)


def test_what_fits_into_one_file_is_one_file() -> None:
    (shard,) = plan_shards({"a": 4, "b": 4}, 8)
    assert shard.name == WEIGHTS_NAME
    assert shard.tensor_names == ("a", "b")


def test_several_files_are_numbered_and_a_large_tensor_has_one_of_its_own() -> None:
    shards = plan_shards({"a": 4, "b": 9, "c": 4, "d": 4}, 8)
    assert [shard.tensor_names for shard in shards] == [("a",), ("b",), ("c", "d")]
    assert [shard.name for shard in shards] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_shards_are_of_even_size() -> None:
    shards = plan_shards(dict.fromkeys("abcdef", 4), 16)
    assert [len(shard.tensor_names) for shard in shards] == [3, 3]


def test_the_index_names_the_file_of_each_tensor() -> None:
    sizes = {"a": 8, "b": 8}
    index = json.loads(encode_index(plan_shards(sizes, 8), sizes))
    assert index["weight_map"] == {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    assert index["metadata"] == {"total_size": 16}
    assert not INDEX_NAME.endswith(".safetensors")


@given(sizes=SIZES, limit=st.integers(1, 60))
def test_every_tensor_is_in_one_shard_in_order_and_fewer_shards_would_not_do(sizes: dict[str, int], limit: int) -> None:
    shards = plan_shards(sizes, limit)
    assert [name for shard in shards for name in shard.tensor_names] == list(sizes)
    filled = [sum(sizes[name] for name in shard.tensor_names) for shard in shards]
    assert all(len(shard.tensor_names) == 1 or total <= limit for shard, total in zip(shards, filled, strict=True))
    greedy, room = 1, limit
    for index, size in enumerate(sizes.values()):
        greedy, room = (greedy, room - size) if size <= room or index == 0 else (greedy + 1, limit - size)
    assert len(shards) == greedy
