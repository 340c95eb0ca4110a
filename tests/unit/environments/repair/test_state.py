"""The rules of one attempt: what was shown, what may be edited, what is recorded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.environments.base import ToolOutcome, ToolStatus
from steelyard.environments.repair.catalogue import Case
from steelyard.environments.repair.state import (
    MAX_OUTPUT_CHARS,
    NoArguments,
    PublicTask,
    RepairState,
    ReplaceLine,
)
from steelyard.types import CallResult, CallStatus, ToolCall

SOURCE = "def f(a):\n b = a - 1\n return b\n"
VISIBLE = (Case((1,), 2), Case((2,), 3))


def make_state() -> RepairState:
    return RepairState(PublicTask(source=SOURCE, visible=VISIBLE))


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id="call_0", name=name, arguments=arguments)


def returned(*values: object) -> list[CallResult]:
    return [CallResult(status=CallStatus.RETURNED, value=value) for value in values]


def test_a_line_is_replaced_and_keeps_its_indentation() -> None:
    state = make_state()
    changed, outcome = state.replace(SOURCE, ReplaceLine(2, "b = a + 1"))
    assert changed == "def f(a):\n b = a + 1\n return b\n"
    assert outcome == ToolOutcome(text="2  b = a + 1")
    assert state.artifact().source == changed
    assert state.artifact().actions[0].number == 2


def test_the_second_of_two_edits_of_one_line_in_one_message_fails() -> None:
    state = make_state()
    changed, _ = state.replace(SOURCE, ReplaceLine(2, "b = a + 1"))
    assert changed is not None
    again, outcome = state.replace(changed, ReplaceLine(2, "b = a + 2"))
    assert again is None
    assert outcome.outcome is ToolStatus.ERROR
    assert outcome.text == "error: the line has changed\n2  b = a + 1"
    assert state.artifact().actions[-1].number is None


def test_what_was_shown_in_an_earlier_turn_may_be_edited() -> None:
    state = make_state()
    changed, _ = state.replace(SOURCE, ReplaceLine(2, "b = a + 1"))
    state.turn_ended()
    assert changed is not None
    again, _ = state.replace(changed, ReplaceLine(2, "b = a + 2"))
    assert again == "def f(a):\n b = a + 2\n return b\n"


def test_a_line_changed_behind_the_agents_back_is_shown_before_it_can_be_edited() -> None:
    state = make_state()
    foreign = SOURCE.replace("a - 1", "a - 9")
    refused, outcome = state.replace(foreign, ReplaceLine(2, "b = a + 1"))
    assert refused is None
    assert "b = a - 9" in outcome.text
    state.turn_ended()
    changed, _ = state.replace(foreign, ReplaceLine(2, "b = a + 1"))
    assert changed == "def f(a):\n b = a + 1\n return b\n"


def test_a_line_that_is_no_longer_there_cannot_be_edited() -> None:
    refused, outcome = make_state().replace("def f(a):\n", ReplaceLine(3, "return a"))
    assert refused is None
    assert outcome.outcome is ToolStatus.ERROR


LINES = st.lists(st.text(st.characters(codec="ascii", categories=("L", "N", "Zs")), max_size=8), min_size=1, max_size=6)


@given(LINES, LINES, st.data())
def test_an_edit_succeeds_exactly_when_the_line_is_as_last_shown(
    shown: list[str], present: list[str], data: st.DataObject
) -> None:
    state = RepairState(PublicTask(source="\n".join(shown) + "\n", visible=VISIBLE))
    number = data.draw(st.integers(1, len(shown)))
    same = number <= len(present) and present[number - 1] == shown[number - 1]
    changed, outcome = state.replace("\n".join(present) + "\n", ReplaceLine(number, "new"))
    assert (changed is not None) == same
    assert (outcome.outcome is ToolStatus.OK) == same
    if changed is not None:
        lines = changed.removesuffix("\n").split("\n")
        assert lines[number - 1].strip() == "new"
        assert lines[: number - 1] + lines[number:] == present[: number - 1] + present[number:]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("run_test", "{}", "error: unknown tool"),
        ("run_tests", '{"all": true}', "error: bad arguments"),
        ("run_tests", "", "error: bad arguments"),
        ("replace_line", '{"number": 2}', "error: bad arguments"),
        ("replace_line", '{"number": "2", "text": "b"}', "error: bad arguments"),
        ("replace_line", '{"number": 2, "text": "b"', "error: bad arguments"),
        ("replace_line", '{"number": 4, "text": "b"}', "error: no such line"),
        ("replace_line", '{"number": 0, "text": "b"}', "error: no such line"),
        ("replace_line", '{"number": 2, "text": "b\\nc"}', "error: the text must be one short line"),
        ("replace_line", '{"number": 2, "text": "b\\u2028c"}', "error: the text must be one short line"),
    ],
)
def test_a_wrong_call_is_told_to_the_agent_and_recorded(name: str, arguments: str, text: str) -> None:
    state = make_state()
    outcome = state.decode(call(name, arguments))
    assert isinstance(outcome, ToolOutcome)
    assert outcome.text == text
    assert not outcome.is_valid
    assert [action.is_valid for action in state.artifact().actions] == [False]
    assert state.artifact().source == SOURCE


def test_right_calls_are_decoded() -> None:
    state = make_state()
    assert state.decode(call("run_tests", "{}")) == NoArguments()
    assert state.decode(call("replace_line", '{"number": 2, "text": "b"}')) == ReplaceLine(2, "b")
    assert state.artifact().actions == ()


@given(st.text(max_size=20), st.text(max_size=40))
def test_no_text_at_all_makes_decoding_fail(name: str, arguments: str) -> None:
    assert isinstance(make_state().decode(call(name, arguments)), ToolOutcome | NoArguments | ReplaceLine)


def test_passing_tests_are_counted() -> None:
    state = make_state()
    assert state.tested(SOURCE, returned(2, 3)).text == "2 of 2 pass"
    assert state.artifact().actions[0].num_failing == 0


@pytest.mark.parametrize(
    ("results", "text"),
    [
        (returned(2, 4), "1 of 2 fail: f(2) = 4, want 3"),
        (returned(True, None), "2 of 2 fail: f(1) = True, want 2"),
        (
            [CallResult(status=CallStatus.RAISED, error="IndexError: x")] * 2,
            "2 of 2 fail: f(1) raised IndexError, want 2",
        ),
        (
            [CallResult(status=CallStatus.CRASHED), CallResult(status=CallStatus.NOT_RUN)],
            "2 of 2 fail: f(1) crashed, want 2",
        ),
    ],
)
def test_the_first_failing_test_is_shown(results: list[CallResult], text: str) -> None:
    assert make_state().tested(SOURCE, results).text == text


def test_a_call_that_times_out_is_an_observation() -> None:
    outcome = make_state().tested(
        SOURCE, [CallResult(status=CallStatus.TIMED_OUT), CallResult(status=CallStatus.NOT_RUN)]
    )
    assert outcome.text == "2 of 2 fail: f(1) timed out, want 2"
    assert outcome.outcome is ToolStatus.TIMEOUT
    assert outcome.is_valid


@pytest.mark.parametrize("value", ["x" * 10_000, 10**5000, list(range(5000))], ids=["text", "number", "list"])
def test_a_monstrous_value_makes_no_monstrous_output(value: object) -> None:
    outcome = make_state().tested(SOURCE, returned(value, 3))
    assert len(outcome.text) <= MAX_OUTPUT_CHARS + 40


def test_a_lost_result_is_an_error_of_ours() -> None:
    with pytest.raises(ValueError, match="longer"):
        make_state().tested(SOURCE, returned(2))


def test_submitting_ends_the_attempt_with_the_file_as_it_stands() -> None:
    state = make_state()
    assert state.submit("def f(a):\n return a\n").done
    artifact = state.artifact()
    assert artifact.submitted
    assert artifact.source == "def f(a):\n return a\n"


def test_actions_carry_the_turn_in_which_they_were_done() -> None:
    state = make_state()
    state.no_call()
    state.turn_ended()
    state.submit(SOURCE)
    assert [action.turn_index for action in state.artifact().actions] == [0, 1]
