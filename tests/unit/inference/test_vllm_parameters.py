"""The declared map between published parameters and the memory of vLLM."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import IntegrityError
from steelyard.inference.vllm_parameters import Described, found_parameters, map_parameters
from steelyard.types import ParameterDigest

WIDTH = 8


def published(shapes: dict[str, tuple[int, ...]]) -> tuple[ParameterDigest, ...]:
    return tuple(
        ParameterDigest(name=name, shape=shape, dtype="float32", digest=name) for name, shape in shapes.items()
    )


LAYER = {
    "model.layers.0.self_attn.q_proj.weight": (6, WIDTH),
    "model.layers.0.self_attn.k_proj.weight": (2, WIDTH),
    "model.layers.0.self_attn.v_proj.weight": (2, WIDTH),
}


@given(
    heads=st.integers(1, 4), kv_heads=st.integers(1, 4), inner=st.integers(1, 9), vocabulary=st.integers(1, 200),
    is_tied=st.booleans(), has_bias=st.booleans(),
)  # fmt: skip
def test_every_published_row_is_mapped_once_and_what_is_left_is_padding(
    heads: int, kv_heads: int, inner: int, vocabulary: int, is_tied: bool, has_bias: bool
) -> None:
    padded = -(-vocabulary // 64) * 64
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, WIDTH)}
    memory: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (padded, WIDTH)}
    if not is_tied:
        shapes["lm_head.weight"], memory["lm_head.weight"] = (vocabulary, WIDTH), (padded, WIDTH)
    for kind, rest in (("weight", (WIDTH,)), *((("bias", ()),) if has_bias else ())):
        for part, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            shapes[f"{attention}{part}.{kind}"] = (rows, *rest)
        memory[f"{attention}qkv_proj.{kind}"] = (heads + 2 * kv_heads, *rest)
        shapes[f"{mlp}gate_proj.{kind}"] = shapes[f"{mlp}up_proj.{kind}"] = (inner, *rest)
        memory[f"{mlp}gate_up_proj.{kind}"] = (2 * inner, *rest)
    shapes["model.norm.weight"] = memory["model.norm.weight"] = (WIDTH,)

    runs = map_parameters(published(shapes), memory, version=3)
    assert sorted(run.name for run in runs if run.name is not None) == sorted(shapes)
    for name, shape in memory.items():
        here = sorted(
            (run.first, shape[0] if run.number < 0 else run.number) for run in runs if run.memory_name == name
        )
        assert [first for first, _ in here] == [sum(number for _, number in here[:at]) for at in range(len(here))]
        assert sum(number for _, number in here) == shape[0]
    described = [
        Described(
            dtype="float32", digest=run.name or "", is_zero=run.name is None, shape=shapes.get(run.name or "", ())
        )
        for run in runs
    ]
    assert {(one.name, one.shape) for one in found_parameters(runs, described, 3)} == set(shapes.items())


@pytest.mark.parametrize(
    ("shapes", "memory", "words"),
    [
        ({"a.weight": (2,)}, {"a.weight": (2,), "b.weight": (2,)}, "b.weight in the memory of vLLM was not published"),
        ({"a.weight": (2,), "b.weight": (2,)}, {"a.weight": (2,)}, "parameter b.weight is missing in the memory"),
        (LAYER, {"model.layers.0.self_attn.qkv_proj.weight": (12, WIDTH)}, "must have 10 rows for .*, got 12"),
        (dict(list(LAYER.items())[:2]), {"model.layers.0.self_attn.qkv_proj.weight": (10, WIDTH)}, "v_proj.weight, wh"),
    ],
)  # fmt: skip
def test_what_the_map_does_not_explain_is_an_error(
    shapes: dict[str, tuple[int, ...]], memory: dict[str, tuple[int, ...]], words: str
) -> None:
    with pytest.raises(IntegrityError, match=words):
        map_parameters(published(shapes), memory, version=3)


def test_padding_that_is_not_zero_is_an_error() -> None:
    runs = map_parameters(published({"lm_head.weight": (3, 2)}), {"lm_head.weight": (64, 2)}, version=3)
    described = [
        Described(dtype="float32", digest=run.name or "", is_zero=False, shape=(run.number, 2)) for run in runs
    ]
    with pytest.raises(IntegrityError, match=r"rows 3 and on of lm_head\.weight"):
        found_parameters(runs, described, 3)
