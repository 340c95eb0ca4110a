"""How the tensors of a version are spread over files, named and indexed as Hugging Face does. Imports no torch.

One shard is ``model.safetensors``. Several are ``model-00001-of-00003.safetensors`` and so on, with
``model.safetensors.index.json``, which says of each tensor in which file it is.
https://huggingface.co/docs/transformers/big_models#sharded-checkpoints
"""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_PATTERN = "*.safetensors"


@dataclass(frozen=True)
class Shard:
    """One file of weights, and the tensors in it in order."""

    name: str
    tensor_names: tuple[str, ...]


def plan_shards(sizes_bytes: Mapping[str, int], max_shard_bytes: int) -> tuple[Shard, ...]:
    """Cut the tensors, in their order, into as few shards of at most ``max_shard_bytes`` as there can be.

    A tensor that is larger by itself gets a shard of its own. The largest shard is as small as that number of shards
    allows, so that they are read and written evenly and none is so small that its loss would hardly show.
    """
    num_shards = len(_cut(sizes_bytes, max_shard_bytes))
    limits = range(max_shard_bytes + 1)
    limit = bisect_left(limits, True, key=lambda limit_bytes: len(_cut(sizes_bytes, limit_bytes)) <= num_shards)
    cuts = _cut(sizes_bytes, limit)
    if len(cuts) == 1:
        return (Shard(WEIGHTS_NAME, tuple(cuts[0])),)
    stem = WEIGHTS_NAME.removesuffix(".safetensors")
    return tuple(
        Shard(f"{stem}-{number:05d}-of-{len(cuts):05d}.safetensors", tuple(names))
        for number, names in enumerate(cuts, start=1)
    )


def _cut(sizes_bytes: Mapping[str, int], limit_bytes: int) -> list[list[str]]:
    cuts: list[list[str]] = [[]]
    filled_bytes = 0
    for name, num_bytes in sizes_bytes.items():
        if cuts[-1] and filled_bytes + num_bytes > limit_bytes:
            cuts.append([])
            filled_bytes = 0
        cuts[-1].append(name)
        filled_bytes += num_bytes
    return cuts


def encode_index(shards: tuple[Shard, ...], sizes_bytes: Mapping[str, int]) -> bytes:
    """The bytes of the index over several shards."""
    weight_map = {name: shard.name for shard in shards for name in shard.tensor_names}
    index = {"metadata": {"total_size": sum(sizes_bytes.values())}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
