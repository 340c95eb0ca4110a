"""Which versions sampled which tokens of a request: the server's stamps against the loads that we know."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import EngineError
from steelyard.inference.vllm_api import Choice, Chunk, LabelSpan, Logprob, LogprobList
from steelyard.inference.vllm_request import Load, RunningRequest
from steelyard.testing.versions import request_for
from steelyard.types import VersionSpan


def running(*lengths: int, loads: list[Load]) -> RunningRequest:
    """A request that got ``lengths[i]`` tokens under ``loads[i]``; a load without tokens has no stamp."""
    one = RunningRequest(request_for("req_a", (1,)), loads[0], "rep_0")
    total = sum(lengths)
    stamps, at = [], 0
    for load, length in zip(loads, lengths, strict=True):
        if length:
            stamps.append(LabelSpan(version=load.label, start=at, end=at + length))
        at += length
    content = [Logprob(token_id=token, logprob=-1.0) for token in range(total)]
    choice = Choice(
        finish_reason="length", token_ids=list(range(total)), logprobs=LogprobList(content), weight_versions=stamps
    )
    one.take(Chunk(choices=[choice]))
    return one


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6))
def test_spans_follow_the_stamps_and_kept_kv_is_as_old_as_the_chain_of_changes_that_kept_it(
    parts: list[tuple[int, bool]],
) -> None:
    loads = [Load(version=at, load_id=f"load_{at}", kept_kv=kept) for at, (_, kept) in enumerate(parts)]
    found = running(*(length for length, _ in parts), loads=loads).spans(loads)
    position = 0
    expected = []
    for at, (length, _) in enumerate(parts):
        if length:
            oldest = at
            while oldest > 0 and parts[oldest][1]:
                oldest -= 1
            expected.append(VersionSpan(start=position, version=at, kv_version=None if oldest == at else oldest))
        position += length
    assert found == tuple(expected)


def test_without_the_last_chunk_the_only_load_is_meant_and_of_two_nobody_knows() -> None:
    loads = [Load(version=0, load_id="load_a"), Load(version=1, load_id="load_b")]
    one = running(3, 0, loads=loads)
    one.label_spans = None
    assert one.spans(loads[:1]) == (VersionSpan(start=0, version=0),)
    with pytest.raises(EngineError, match=r"rep_0 \(vllm\): request req_a must say which weights sampled its tokens"):
        one.spans(loads)


def test_two_loads_of_one_version_have_labels_of_their_own() -> None:
    loads = [Load(version=4, load_id="load_a"), Load(version=4, load_id="load_b")]
    with pytest.raises(EngineError, match="must be sampled by 4:load_b, the server says 4:load_a"):
        running(3, 0, loads=loads).spans(loads[1:])
