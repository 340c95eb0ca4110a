import tempfile
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from steelyard.testing.traces import make_turn
from steelyard.traces.open_traces import OpenTraces, outline_of
from steelyard.traces.sealed import decode_sealed, splice_sealed
from steelyard.types import EndReason, ToolRecord, Trace, Turn


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_turns_of_more_attempts_than_files_may_be_open_all_stand_in_their_own_file(tmp_path: Path) -> None:
    traces = OpenTraces(tmp_path, max_open_files=2)
    num_before = num_open_files()
    for index in range(3):
        for attempt_id in ("att_a", "att_b", "att_c"):
            traces.append(make_turn(attempt_id, index))
    assert num_open_files() - num_before == 2
    for attempt_id in ("att_a", "att_b", "att_c"):
        assert traces.turns(attempt_id) == tuple(make_turn(attempt_id, index) for index in range(3))
    traces.close()
    assert num_open_files() == num_before


def test_a_removed_trace_is_begun_anew_and_not_written_into_its_deleted_file(tmp_path: Path) -> None:
    traces = OpenTraces(tmp_path)
    traces.append(make_turn("att_a", 0))
    traces.remove("att_a")
    assert traces.append(make_turn("att_a", 1)) == 0
    assert traces.turns("att_a") == (make_turn("att_a", 1),)
    traces.close()


def test_the_file_of_a_removed_trace_becomes_that_of_a_new_one_and_is_no_trace_in_between(tmp_path: Path) -> None:
    traces = OpenTraces(tmp_path)
    for attempt_id in ("att_a", "att_b"):
        traces.append(make_turn(attempt_id, 0))
    number = (tmp_path / "att_a").stat().st_ino
    traces.remove("att_a")
    assert (tuple(traces.attempts()), [path.name for path in traces.paths()]) == (("att_b",), ["att_b"])
    assert traces.turns("att_a") == ()
    assert traces.append(make_turn("att_c", 0)) == 0
    assert (tmp_path / "att_c").stat().st_ino == number
    assert sorted(traces.attempts()) == ["att_b", "att_c"]
    assert traces.turns("att_c") == (make_turn("att_c", 0),)
    traces.remove("att_b")
    traces.close()
    assert [path.name for path in tmp_path.iterdir()] == ["att_c"]


@given(
    actions=st.lists(st.tuples(st.sampled_from(["append", "retract", "remove", "reopen"]), st.integers(0, 3))),
    max_open_files=st.integers(1, 5),
)
def test_traces_that_share_few_files_never_hold_a_turn_of_another(
    actions: list[tuple[str, int]], max_open_files: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        traces = OpenTraces(Path(folder), max_open_files)
        held: dict[str, list[Turn]] = {f"att_{number}": [] for number in range(4)}
        for action, number in actions:
            attempt_id = f"att_{number}"
            turns = held[attempt_id]
            if action in ("append", "retract"):
                turn = make_turn(attempt_id, len(turns))
                num_bytes = traces.append(turn)
                if action == "append":
                    turns.append(turn)
                else:
                    traces.retract(attempt_id, num_bytes)
            elif action == "remove":
                traces.remove(attempt_id)
                turns.clear()
            else:
                traces.close()
                traces = OpenTraces(Path(folder), max_open_files)
            assert {name: list(traces.turns(name)) for name in held} == held
            assert sorted(traces.attempts()) == [name for name, turns in held.items() if turns]
        traces.close()


@given(lengths=st.lists(st.integers(1, 6), max_size=4), num_tools=st.integers(0, 2))
def test_spliced_bytes_are_those_of_the_whole_trace(lengths: list[int], num_tools: int) -> None:
    turns = tuple(make_turn("att_a", index, num_tokens=length) for index, length in enumerate(lengths))
    tools = (ToolRecord(tool_call_id="call_a", turn_index=0, name="f", outcome="ok", latency_s=0.5),) * num_tools
    trace = Trace(attempt_id="att_a", turns=turns, end_reason=EndReason.SUBMITTED, tools=tools)
    data, digest = splice_sealed(
        "att_a", [memoryview(msgspec.msgpack.encode(turn)) for turn in turns], EndReason.SUBMITTED, tools
    )
    assert data.partition(b"\n")[2] == msgspec.msgpack.encode(trace)
    assert decode_sealed("att_a", data, "here") == (trace, digest)


def test_outlines_say_of_each_turn_what_the_turn_says(tmp_path: Path) -> None:
    traces = OpenTraces(tmp_path)
    turns = tuple(make_turn("att_a", index, segment_index=index // 2, version=index) for index in range(3))
    for turn in turns:
        traces.append(turn)
    payloads, outlines = traces.payloads("att_a")
    assert [msgspec.msgpack.decode(payload, type=type(turns[0])) for payload in payloads] == list(turns)
    assert outlines == tuple(map(outline_of, turns))
    traces.close()
    again = OpenTraces(tmp_path)
    assert again.payloads("att_a") == (payloads, outlines), "where another process wrote them, they are decoded"
    again.close()


def test_a_trace_that_is_removed_twice_and_begun_again_is_on_the_disk(tmp_path: Path) -> None:
    traces = OpenTraces(tmp_path)
    turn = make_turn("att_a", 0)
    traces.append(turn)
    traces.remove("att_a")
    traces.remove("att_a")
    traces.append(turn)
    assert list(traces.attempts()) == ["att_a"]
    traces.close()
    assert OpenTraces(tmp_path).turns("att_a") == (turn,)


def test_outlines_of_a_trace_that_was_cut_back_are_of_what_is_left(tmp_path: Path) -> None:
    traces = OpenTraces(tmp_path)
    turns = tuple(make_turn("att_a", index, num_tokens=index + 1) for index in range(4))
    traces.append(turns[0])
    num_bytes = traces.append(turns[1])
    traces.retract("att_a", num_bytes)
    for turn in turns[2:]:
        traces.append(turn)
    assert traces.payloads("att_a")[1] == tuple(map(outline_of, (turns[0], *turns[2:])))
    traces.close()
