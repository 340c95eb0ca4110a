import msgspec

from steelyard.testing.traces import make_turn
from steelyard.traces.export import show_trace, token_lines
from steelyard.types import EndReason, ToolRecord, Trace, VersionSpan


def decode(token_ids: object) -> str:
    return "".join(f"<{token}>" for token in token_ids)  # type: ignore[attr-defined]


def a_trace() -> Trace:
    spans = (VersionSpan(start=0, version=4), VersionSpan(start=2, version=5))
    turns = (
        msgspec.structs.replace(make_turn("att_a", 0), version_spans=spans),
        make_turn("att_a", 1, version=5),
        make_turn("att_a", 2, segment_index=1, version=5),
    )
    tool = ToolRecord(
        tool_call_id="call_1", turn_index=0, name="run_tests", outcome="ok", latency_s=0.0125, is_valid=False
    )
    return Trace(attempt_id="att_a", turns=turns, end_reason=EndReason.LENGTH, tools=(tool,))


def test_a_trace_is_shown_with_its_ending_its_tools_and_its_digest() -> None:
    text = show_trace(a_trace(), "d" * 32, decode)
    assert "attempt att_a: 3 turns, 15 sampled tokens, ended as length, trace " + "d" * 32 in text
    assert "turn 0: run_tests -> ok in 12.5 ms (not a valid call)" in text
    assert text.count("== segment") == 2
    assert "[v4 x 2, v5 x 3]" in text


def test_each_prompt_shows_only_what_is_new_in_its_segment() -> None:
    lines = show_trace(a_trace(), "d" * 32, decode).splitlines()
    prompts = [line for line in lines if line.startswith(". ")]
    assert prompts[0] == ". <1000><1001><1002>"
    assert prompts[1] == ". <1008><1009><1010>"
    assert prompts[2].startswith(". <1000><1001>")


def test_every_token_has_a_line_with_mask_version_and_logprob() -> None:
    lines = token_lines(a_trace(), 0, decode)
    assert len(lines) == 16
    assert lines[0].split() == ["0", "1000", ".", "'<1000>'"]
    assert lines[3].split() == ["3", "1003", "+", "4", "-0.2500", "0.0000", "'<1003>'"]
    assert lines[6].split() == ["6", "1006", "+", "5", "-0.6250", "0.0000", "'<1006>'"]
    assert [line.split()[2] for line in lines] == list("...+++++...+++++")
    text = show_trace(a_trace(), "d" * 32, decode, with_tokens=True)
    assert all(line in text for line in lines)
