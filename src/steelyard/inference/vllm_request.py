"""One request at a vLLM server: what has come of it, and what that means. Pure: no I/O, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from steelyard.errors import EngineError
from steelyard.inference.vllm_api import Choice, Chunk, LabelSpan
from steelyard.types import FinishReason, GenerateRequest, GenerateResult, VersionSpan

_ENDS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(frozen=True, kw_only=True)
class Load:
    """A version in the server's memory. ``label`` is what the server stamps tokens with.

    ``kept_kv``: the KV of running requests stayed when it was loaded.
    """

    version: int
    load_id: str
    kept_kv: bool = False

    @property
    def label(self) -> str:
        """``version:load id``: never the same for two loads."""
        return f"{self.version}:{self.load_id}"


@dataclass
class RunningRequest:
    """Tokens so far. ``load`` served when it was sent; ``cut``: why we ended it, if we did."""

    request: GenerateRequest
    load: Load
    replica_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    label_spans: list[LabelSpan] | None = None
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    cut: FinishReason | None = None
    detail: str = ""
    is_spoilt: bool = False

    def take(self, chunk: Chunk) -> tuple[int, ...]:
        """Add a chunk; returns its tokens.

        Raises:
            EngineError: ids or log-probabilities are missing; names the replica and the request.
        """
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            self.num_cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens or 0
        new: tuple[int, ...] = ()
        for choice in chunk.choices:
            new += self._take_tokens(choice)
            if choice.finish_reason is not None and self.finish is None:
                self._end(choice)
        return new

    def end(self, finish: FinishReason, detail: str = "") -> None:
        """It is over, whatever the server says later."""
        self.finish, self.detail = finish, detail

    def spoil(self, detail: str) -> None:
        """Its tokens must not be used."""
        self.is_spoilt = True
        self.end(FinishReason.ENGINE_ERROR, detail)

    def spans(self, loads: Sequence[Load]) -> tuple[VersionSpan, ...]:
        """Which versions sampled which tokens.

        The server's own stamps, or, where its last chunk never came, the only load that there was meanwhile.

        Args:
            loads: all loads since the request was sent, oldest first.

        Raises:
            EngineError: nobody knows, or the stamps are not of our loads or do not cover the tokens.
        """
        if not self.token_ids:
            return ()
        stamps = self.label_spans
        if stamps is None:
            if len(loads) != 1:
                raise self._broken("must say which weights sampled its tokens, the server broke off in between")
            stamps = [LabelSpan(version=loads[0].label, start=0, end=len(self.token_ids))]
        elif self.finish is FinishReason.ENGINE_ERROR:
            # Tokens from the first without a log-probability on were thrown away.
            kept = len(self.token_ids)
            stamps = [
                LabelSpan(version=one.version, start=one.start, end=min(one.end, kept))
                for one in stamps
                if one.start < kept
            ]
        labels = {load.label: index for index, load in enumerate(loads)}
        spans, reached = [], 0
        for stamp in stamps:
            index = labels.get(stamp.version)
            if index is None:
                raise self._broken(f"must be sampled by {' or '.join(labels)}, the server says {stamp.version}")
            if stamp.start != reached or stamp.end <= stamp.start:
                raise self._broken(f"must have version spans without gaps, got {stamp.start} to {stamp.end}")
            spans.append(_span(stamp.start, index, loads))
            reached = stamp.end
        if reached != len(self.token_ids):
            raise self._broken(f"must have version spans over {len(self.token_ids)} tokens, got {reached}")
        return tuple(spans)

    def _take_tokens(self, choice: Choice) -> tuple[int, ...]:
        if choice.token_ids is None:
            raise self._broken("must come with token_ids, the server sent none")
        content = [] if choice.logprobs is None else choice.logprobs.content or []
        if [one.token_id for one in content] != choice.token_ids:
            raise self._broken(
                f"must come with one log-probability per token id, got {len(content)} for {len(choice.token_ids)}"
            )
        if self.finish is FinishReason.ENGINE_ERROR:
            return ()
        taken = []
        for one in content:
            if one.logprob is None or not one.is_number:
                position = len(self.token_ids)
                detail = f"the log-probability of token {position} must be a number <= 0, got {one.logprob}"
                self.end(FinishReason.ENGINE_ERROR, f"{self.replica_id}: {detail}")
                break
            self.token_ids.append(one.token_id)
            self.logprobs.append(one.logprob)
            taken.append(one.token_id)
        return tuple(taken)

    def _end(self, choice: Choice) -> None:
        self.label_spans = choice.weight_versions
        finish = _ENDS.get(choice.finish_reason or "")
        if finish is not None:
            self.finish = finish
        elif self.cut is not None:
            self.finish = self.cut
        else:
            self.end(FinishReason.ENGINE_ERROR, f"{self.replica_id}: the server ended it with {choice.finish_reason!r}")

    def _broken(self, problem: str) -> EngineError:
        return EngineError(f"{self.replica_id} (vllm): request {self.request.request_id} {problem}")


def unsampled(request: GenerateRequest, replica_id: str, finish: FinishReason, detail: str = "") -> GenerateResult:
    """A result without tokens."""
    return GenerateResult(
        request_id=request.request_id,
        token_ids=(),
        logprobs=(),
        kept_logmass=(),
        version_spans=(),
        finish_reason=finish,
        replica_id=replica_id,
        load_id="",
        detail=detail,
    )


def _span(start: int, index: int, loads: Sequence[Load]) -> VersionSpan:
    """A request that was sent under an older load may hold KV of it, for as long as every change kept KV."""
    oldest, at = loads[index].version, index
    while at > 0 and loads[at].kept_kv:
        at -= 1
        oldest = min(oldest, loads[at].version)
    version = loads[index].version
    return VersionSpan(start=start, version=version, kv_version=oldest if oldest != version else None)
