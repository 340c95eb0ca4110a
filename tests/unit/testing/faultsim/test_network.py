import random

import msgspec
import pytest

from steelyard.errors import DeadlineExceeded, IllegalTransition, Refused, RemoteFailed, RunError
from steelyard.testing.faultsim.loop import VirtualLoop, run
from steelyard.testing.faultsim.network import Caller, Method, Network, Server, Weather
from steelyard.testing.faultsim.processes import Life, ProcessClock
from steelyard.types import Sampling


class Pair:
    """A client and a server that counts what it carries out."""

    def __init__(self, weather: Weather | None = None, seed: int = 0) -> None:
        self.loop = VirtualLoop(1000.0)
        self.network = Network(self.loop, random.Random(seed))
        self.network.weather = weather or Weather()
        self.server_life = Life("server", 1, self.loop, ProcessClock(self.loop, 0.0))
        self.client_life = Life("client", 1, self.loop, ProcessClock(self.loop, 0.0))
        self.seen: list[object] = []
        self.findings: list[BaseException] = []
        methods = {"note": Method(tuple[Sampling], self._note), "fail": Method(tuple[str], self._fail)}
        Server(self.server_life, self.network, methods, self.findings.append, lambda _: None)
        self.caller = Caller(self.client_life, self.network, "server", retry_s=1.0, give_up_s=10.0)

    async def _note(self, sampling: Sampling) -> Sampling:
        self.seen.append(sampling)
        return sampling

    async def _fail(self, kind: str) -> None:
        raise {"late": Refused("late", "no"), "illegal": IllegalTransition("no"), "run": RunError("no")}[kind]


def test_a_call_on_a_bad_network_is_answered_and_carried_out_at_least_once() -> None:
    pair = Pair(Weather(loss_frac=0.4, double_frac=0.3, mean_delay_s=0.2, slow_frac=0.2, slow_s=3.0))
    asked = [Sampling(seed=number) for number in range(30)]

    async def main() -> None:
        for sampling in asked:
            assert await pair.caller.call("note", (sampling,), Sampling) == sampling

    run(main(), pair.loop)
    assert {msgspec.json.encode(seen) for seen in pair.seen} == {msgspec.json.encode(one) for one in asked}
    assert len(pair.seen) > len(asked), "some of them came twice"
    assert all(seen is not one for seen in pair.seen for one in asked), "no object is shared"


def test_a_call_across_a_cut_network_fails_when_its_time_is_over() -> None:
    pair = Pair()
    pair.network.cut.add(frozenset(("client", "server")))

    async def main() -> None:
        with pytest.raises(DeadlineExceeded, match="an answer to note"):
            await pair.caller.call("note", (Sampling(),), Sampling)
        assert pair.loop.time() == pytest.approx(10.0)

    run(main(), pair.loop)
    assert pair.seen == []


def test_errors_arrive_as_what_they_were_or_as_failures_of_the_other_side() -> None:
    pair = Pair()

    async def main() -> None:
        with pytest.raises(Refused) as refused:
            await pair.caller.call("fail", ("late",))
        assert refused.value.reason == "late"
        with pytest.raises(IllegalTransition):
            await pair.caller.call("fail", ("illegal",))
        with pytest.raises(RemoteFailed, match="RunError"):
            await pair.caller.call("fail", ("run",))

    run(main(), pair.loop)


def test_an_error_that_no_server_may_meet_is_told() -> None:
    pair = Pair()

    async def main() -> None:
        with pytest.raises(DeadlineExceeded):
            await pair.caller.call("fail", ("unheard of",))

    run(main(), pair.loop)
    assert [type(finding) for finding in pair.findings][-1] is KeyError


def test_packets_for_a_dead_process_are_gone_and_those_for_a_stopped_one_wait() -> None:
    pair = Pair()

    async def main() -> None:
        pair.server_life.is_stopped = True
        pair.loop.call_later(5.0, pair.loop.go_on, pair.server_life)
        await pair.caller.call("note", (Sampling(),), Sampling)
        assert pair.loop.time() > 5.0
        pair.server_life.is_dead = True
        with pytest.raises(DeadlineExceeded):
            await pair.caller.call("note", (Sampling(),), Sampling)

    run(main(), pair.loop)
