import asyncio
from pathlib import Path

import msgspec
import pytest

from steelyard.errors import EngineError, IntegrityError, Refused, StorageFailed
from steelyard.gateway.recorder import AttemptLog, Recorder, check_result
from steelyard.gateway.renderer import Prompt
from steelyard.metrics import Counters
from steelyard.testing.gateway import scripted_result
from steelyard.testing.manual_clock import ManualClock
from steelyard.testing.traces import make_turn
from steelyard.traces.ledger import TokenLedger, read_ledger
from steelyard.traces.store import TraceStore
from steelyard.types import EndReason, FinishReason, GenerateRequest, Message, Sampling, Turn, VersionSpan

REQUEST = GenerateRequest(
    request_id="req_1",
    attempt_id="att_a",
    sequence_key="att_a/0",
    policy_version=3,
    prompt_token_ids=(1, 2),
    sampling=Sampling(max_tokens=4),
    stop_token_ids=(9,),
    deadline_at_s=1e9,
)
RESULT = scripted_result(REQUEST, (5, 6, 9), FinishReason.STOP)


class Desk:
    """A recorder with its files."""

    def __init__(self, directory: Path) -> None:
        self.ledger = TokenLedger(directory / "ledger")
        self.store = TraceStore(directory / "traces")
        self.counters = Counters()
        self.recorder = Recorder(self.store, self.ledger, self.counters, ManualClock())

    def log(self) -> AttemptLog:
        return self.recorder.open("att_a", 3)

    def record(self, log: AttemptLog) -> Turn:
        return self.recorder.record(
            log,
            REQUEST,
            RESULT,
            kind="chat",
            prompt=Prompt(token_ids=(1, 2), text="x", messages=()),
            parent=None,
            reply=Message(role="assistant", content="y"),
            break_reason=None,
            started_at_s=5.0,
        )


def test_a_recorded_turn_is_in_the_trace_store_and_in_the_ledger(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    turn = desk.record(desk.log())
    assert desk.store.open_turns("att_a") == (turn,)
    assert read_ledger(tmp_path / "ledger") == {"att_a": 3}
    assert (turn.logprobs, turn.kept_logmass) == (RESULT.logprobs, RESULT.kept_logmass)
    assert (turn.started_at_s, turn.ended_at_s) == (5.0, 1_000_000.0)
    assert desk.counters.read()["gateway.recorded_tokens"] == 3


def test_sealing_checks_what_was_sealed_against_what_was_counted(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.record(desk.log())
    desk.ledger.add("att_a", "req_forged", 1)
    with pytest.raises(IntegrityError, match="1 turns and 4 tokens as counted, but holds 1 and 3"):
        asyncio.run(desk.recorder.seal("att_a", EndReason.SUBMITTED, (), 3))


def test_after_sealing_nothing_is_added_and_sealing_again_gives_the_same(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    log = desk.log()
    desk.record(log)
    sealed = asyncio.run(desk.recorder.seal("att_a", EndReason.SUBMITTED, (), None))
    assert (sealed.num_turns, sealed.num_tokens) == (1, 3)
    assert asyncio.run(desk.recorder.seal("att_a", EndReason.SUBMITTED, (), 3)) == sealed
    with pytest.raises(Refused, match="late"):
        desk.record(log)
    with pytest.raises(Refused, match="late"):
        desk.log()
    assert desk.counters.read()["gateway.unrecorded_tokens"] == 3
    assert read_ledger(tmp_path / "ledger") == {"att_a": 3}


def test_an_attempt_that_is_not_alive_and_has_no_turns_cannot_be_sealed(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="not alive"):
        asyncio.run(Desk(tmp_path).recorder.seal("att_a", EndReason.SUBMITTED, (), None))


def test_discarding_says_what_is_lost_as_often_as_it_is_asked(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    log = desk.log()
    desk.record(log)
    assert [desk.recorder.discard("att_a") for _ in range(2)] == [3, 3]
    with pytest.raises(Refused, match="late"):
        desk.record(log)
    with pytest.raises(Refused, match="discarded"):
        asyncio.run(desk.recorder.seal("att_a", EndReason.SUBMITTED, (), 3))
    assert desk.recorder.discard("att_unknown") == 0


def test_a_sealed_attempt_can_be_discarded_with_all_its_tokens(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.record(desk.log())
    asyncio.run(desk.recorder.seal("att_a", EndReason.SUBMITTED, (), 3))
    assert desk.recorder.discard("att_a") == 3


def test_an_attempt_whose_gateway_died_takes_no_more_turns_and_loses_what_was_counted(tmp_path: Path) -> None:
    before = Desk(tmp_path)
    before.record(before.log())
    before.store.append(make_turn("att_a", 1, num_tokens=7))
    after = Desk(tmp_path)
    with pytest.raises(Refused, match="late"):
        after.log()
    assert after.recorder.discard("att_a") == 3, "the second turn was written and never counted, so never recorded"


def test_tokens_that_a_power_cut_took_from_the_open_trace_are_lost_all_the_same(tmp_path: Path) -> None:
    before = Desk(tmp_path)
    before.record(before.log())
    (tmp_path / "traces" / "open" / "att_a").unlink()
    assert Desk(tmp_path).recorder.discard("att_a") == 3


def test_turns_whose_counts_a_power_cut_took_were_never_recorded(tmp_path: Path) -> None:
    before = Desk(tmp_path)
    before.record(before.log())
    for turn_index in (1, 2):
        before.store.append(make_turn("att_a", turn_index, num_tokens=7))
    assert Desk(tmp_path).recorder.discard("att_a") == 3


def test_an_attempt_whose_gateway_died_cannot_be_sealed_since_turns_may_be_missing(tmp_path: Path) -> None:
    before = Desk(tmp_path)
    before.record(before.log())
    after = Desk(tmp_path)
    with pytest.raises(Refused, match="died under it"):
        asyncio.run(after.recorder.seal("att_a", EndReason.SUBMITTED, (), 3))
    assert not after.store.is_sealed("att_a")


def test_tokens_are_booked_as_lost_only_when_their_count_would_survive_a_power_cut(tmp_path: Path) -> None:
    class RefusingLedger(TokenLedger):
        def sync(self) -> None:
            raise StorageFailed("the disk refused to sync")

    desk = Desk(tmp_path)
    desk.ledger = RefusingLedger(tmp_path / "ledger")
    desk.recorder = Recorder(desk.store, desk.ledger, desk.counters, ManualClock())
    desk.record(desk.log())
    with pytest.raises(StorageFailed, match="refused to sync"):
        desk.recorder.discard("att_a")


def test_a_turn_that_cannot_be_counted_is_taken_back(tmp_path: Path) -> None:
    class FullLedger:
        def add(self, attempt_id: str, request_id: str, num_tokens: int) -> None:
            raise StorageFailed("full")

        def recorded(self, attempt_id: str) -> int:
            return 0

        def sync(self) -> None:
            raise StorageFailed("full")

    desk = Desk(tmp_path)
    desk.recorder = Recorder(desk.store, FullLedger(), desk.counters, ManualClock())
    with pytest.raises(StorageFailed, match="full"):
        desk.record(desk.log())
    assert desk.store.open_turns("att_a") == ()
    assert "gateway.recorded_tokens" not in desk.counters.read()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"request_id": "req_2"}, "request_id must be"),
        ({"token_ids": ()}, "token_ids must hold"),
        ({"logprobs": ()}, "have 0 and 3"),
        ({"logprobs": (-0.5, -0.5)}, "have 2 and 3"),
        ({"kept_logmass": (0.0,)}, "have 3 and 1"),
        ({"logprobs": (-0.5, float("nan"), -0.5)}, r"logprobs\[1\] must be finite"),
        ({"logprobs": (-0.5, -0.5, 0.5)}, r"logprobs\[2\] must be finite and at most 0, not 0\.5"),
        ({"kept_logmass": (float("-inf"), 0.0, 0.0)}, r"kept_logmass\[0\]"),
        ({"token_ids": (5, -1, 9)}, "must not be negative"),
        ({"token_ids": (5, 6, 7)}, "must be one of stop_token_ids"),
        ({"version_spans": ()}, "version_spans must start at 0"),
        ({"version_spans": (VersionSpan(start=1, version=3),)}, "version_spans must start at 0"),
        ({"version_spans": (VersionSpan(start=0, version=3),) * 2}, "version_spans must start at 0 and grow"),
        ({"version_spans": (VersionSpan(start=0, version=2),)}, "must come from version 3, but come from \\[2\\]"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_names_engine_and_request(changes: dict[str, object], fault: str) -> None:
    check_result(REQUEST, RESULT, "vllm")
    with pytest.raises(EngineError, match=f"engine vllm \\(rep_script\\) .* request req_1: .*{fault}"):
        check_result(REQUEST, msgspec.structs.replace(RESULT, **changes), "vllm")


def test_more_tokens_than_were_asked_for_are_refused() -> None:
    long = scripted_result(REQUEST, (5,) * 5, FinishReason.LENGTH)
    with pytest.raises(EngineError, match="at most max_tokens = 4, but are 5"):
        check_result(REQUEST, long, "local")
