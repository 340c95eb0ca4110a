"""A gateway with everything real but the engine, which says what a script tells it to."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from steelyard.clock import Clock, SystemClock
from steelyard.coordinator.capability import CapabilityRing, Role
from steelyard.errors import Refused
from steelyard.gateway.app import GatewayServer, HttpLimits
from steelyard.gateway.attempts import AttemptEndpoint, AttemptLimits, HeldAttempts
from steelyard.gateway.capability import KeyRing
from steelyard.gateway.codec import TokenCodec
from steelyard.gateway.engine_call import Generator
from steelyard.gateway.recorder import Recorder
from steelyard.gateway.renderer import Renderer
from steelyard.gateway.service import Gateway, GatewayLimits
from steelyard.ids import SeededIds
from steelyard.metrics import Counters
from steelyard.run.adapters import Sealer, WorkerKeys
from steelyard.run.news import ToolTimes
from steelyard.testing.tokenizer import write_tokenizer
from steelyard.traces.ledger import TokenLedger
from steelyard.traces.store import TraceStore
from steelyard.types import (
    AttemptBinding,
    EndReason,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Sampling,
    SealedTrace,
    TokenChunk,
    VersionSpan,
)

ATTEMPT = "att_one"
HOLDER = "wrk_one"


class Say(msgspec.Struct, frozen=True, kw_only=True):
    """One scripted answer.

    ``ends``: whether the end-of-turn token is sampled after ``text``. ``changes`` overwrite fields of the
    result, to break the engine's contract on purpose. ``holds``: wait for ``ScriptedGenerator.release``.
    """

    text: str
    ends: bool = True
    finish_reason: FinishReason | None = None
    changes: dict[str, object] = {}
    holds: bool = False


class ScriptedGenerator:
    """An engine that gives the scripted answers in order and keeps the requests that it got.

    ``requests``, ``aborted`` and ``cancelled`` show what was asked of it; ``started`` is set when an answer has
    been streamed, ``left`` when a caller was cancelled.
    """

    def __init__(self, codec: TokenCodec, end_of_turn_id: int, script: Sequence[Say | str]) -> None:
        self._codec = codec
        self._end_of_turn_id = end_of_turn_id
        self._script = [Say(text=entry) if isinstance(entry, str) else entry for entry in script]
        self._tokens: dict[int, tuple[int, ...]] = {}
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.cancelled: list[str] = []
        self.started = asyncio.Event()
        self.left = asyncio.Event()
        self._released = asyncio.Event()

    def release(self) -> None:
        """Let held answers go on."""
        self._released.set()

    def say_tokens(self, index: int, token_ids: tuple[int, ...]) -> None:
        """Let answer ``index`` be exactly these tokens."""
        self._tokens[index] = token_ids

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        """The next scripted answer, token by token where it is streamed."""
        index = len(self.requests)
        say = self._script[index]
        self.requests.append(request)
        said = (*self._codec.encode(say.text), *([self._end_of_turn_id] if say.ends else []))
        token_ids = self._tokens.get(index, said)
        finish = say.finish_reason or (FinishReason.STOP if say.ends else FinishReason.LENGTH)
        sent = 0
        try:
            for token_id in token_ids if on_tokens is not None else ():
                if request.request_id in self.aborted:
                    finish, token_ids = FinishReason.CANCELLED, token_ids[:sent]
                    break
                assert on_tokens is not None
                on_tokens(TokenChunk(request_id=request.request_id, token_ids=(token_id,)))
                sent += 1
                await asyncio.sleep(0)
            self.started.set()
            if say.holds:
                await self._released.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            self.left.set()
            raise
        return msgspec.structs.replace(scripted_result(request, token_ids, finish), **say.changes)

    async def abort(self, request_id: str) -> None:
        """End a streamed answer early."""
        self.aborted.append(request_id)


def scripted_result(request: GenerateRequest, token_ids: tuple[int, ...], finish: FinishReason) -> GenerateResult:
    """A result that keeps the contract, with log-probabilities that depend on the token and its place."""
    return GenerateResult(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=tuple(-0.125 - (token_id + place) % 8 / 16 for place, token_id in enumerate(token_ids)),
        kept_logmass=(0.0,) * len(token_ids),
        version_spans=(VersionSpan(start=0, version=request.policy_version),),
        finish_reason=finish,
        replica_id="rep_script",
        load_id="load_script",
    )


class FixedDirectory:
    """An attempt directory that is a dictionary; delete an entry to end its attempt."""

    def __init__(self, bindings: dict[str, AttemptBinding]) -> None:
        self.bindings = bindings

    def binding(self, attempt_id: str) -> AttemptBinding | None:
        """The binding of a live attempt."""
        return self.bindings.get(attempt_id)

    def holder(self, attempt_id: str) -> str:
        """:data:`HOLDER` for a live attempt; refuses any other as ``late``."""
        if attempt_id not in self.bindings:
            raise Refused("late", f"attempt {attempt_id} is not alive")
        return HOLDER


def binding(
    *,
    policy_version: int = 3,
    max_context_tokens: int = 4096,
    sampling: Sampling | None = None,
    deadline_at_s: float = 4e9,
) -> AttemptBinding:
    """A binding with room and time."""
    return AttemptBinding(
        policy_version=policy_version,
        sampling=sampling or Sampling(temperature=0.7, max_tokens=256),
        max_context_tokens=max_context_tokens,
        deadline_at_s=deadline_at_s,
    )


class GatewayWorld:
    """A gateway over ``directory`` with one live attempt, :data:`ATTEMPT`; all parts are attributes.

    Args:
        engine: answers in the place of the script.
        bindings: of other live attempts than that one, all held by :data:`HOLDER`.
        live: knows the live attempts in their place.
    """

    def __init__(
        self,
        directory: Path,
        script: Sequence[Say | str] = (),
        *,
        engine: Generator | None = None,
        template: str | None = None,
        bindings: dict[str, AttemptBinding] | None = None,
        live: HeldAttempts | None = None,
        limits: GatewayLimits | None = None,
        http_limits: HttpLimits | None = None,
        attempt_limits: AttemptLimits | None = None,
        clock: Clock | None = None,
        port: int = 0,
    ) -> None:
        self.clock = clock or SystemClock()
        self.counters = Counters()
        self.renderer = Renderer.load(write_tokenizer(directory / "tokenizer", template))
        self.generator = ScriptedGenerator(self.renderer.codec, self.renderer.end_of_turn_id, script)
        self.ledger = TokenLedger(directory / "ledger")
        self.store = TraceStore(directory / "traces", before_seal=self.ledger.sync)
        self.recorder = Recorder(self.store, self.ledger, self.counters, self.clock)
        self.directory = FixedDirectory({ATTEMPT: binding()} if bindings is None else bindings)
        known: HeldAttempts = self.directory if live is None else live
        self.keys = KeyRing(b"k" * 32)
        ids = SeededIds(0)
        self.gateway = Gateway(
            self.renderer,
            engine or self.generator,
            self.recorder,
            known,
            ids=ids,
            clock=self.clock,
            counters=self.counters,
            limits=limits,
        )
        self.workers = CapabilityRing(b"w" * 32)
        attempts = AttemptEndpoint(
            WorkerKeys(self.workers),
            known,
            Sealer(self.recorder, known, ToolTimes()),
            self.keys,
            clock=self.clock,
            counters=self.counters,
            limits=attempt_limits,
        )
        self.server = GatewayServer(
            self.gateway,
            self.keys,
            ids=ids,
            clock=self.clock,
            counters=self.counters,
            port=port,
            limits=http_limits,
            attempts=attempts,
        )

    def key(self, attempt_id: str = ATTEMPT) -> str:
        """An API key that is valid for an hour."""
        return self.keys.issue(attempt_id, self.clock.now_s() + 3600)

    def worker_key(self, worker_id: str = HOLDER, role: Role = Role.WORKER, valid_s: float = 3600.0) -> str:
        """A key for the endpoint of attempts."""
        return self.workers.issue(role, worker_id, self.clock.now_s() + valid_s)

    async def seal(self, attempt_id: str = ATTEMPT) -> SealedTrace:
        """Seal the attempt as a harness does when the agent has submitted."""
        return await self.recorder.seal(attempt_id, EndReason.SUBMITTED, (), None)

    async def close(self) -> None:
        """Stop the server and give the files back."""
        await self.server.stop()
        await self.store.close()
        self.ledger.close()
