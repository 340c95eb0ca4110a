"""What an inference engine is, and the records that cross to it. Imports no torch.

::

    gateway --GenerateRequest--> Router --> EngineClient ==socket==> service --> LocalEngine --> GenerateResult
    weights --version directory--> Engine.load --> LoadProof --> coordinator: READY(v)
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

from steelyard.processes.channel import Endpoint, StreamingEndpoint
from steelyard.types import EngineStats, GenerateRequest, GenerateResult, LoadProof, Manifest, Record, TokenChunk

OnTokens = Callable[[TokenChunk], None]


class KvRule(StrEnum):
    """What becomes of the KV of running sequences when weights change under them.

    ``recompute``: it is computed again, so that every later token is exactly the new version's. ``keep``: it stays, and
    the spans say of which version its oldest part is.
    """

    RECOMPUTE = "recompute"
    KEEP = "keep"


class LoadRequest(Record, frozen=True, kw_only=True):
    """Load the version that lies in ``version_dir``; it must be ``version``."""

    version_dir: str
    version: int


class UpdateRequest(Record, frozen=True, kw_only=True):
    """Go over to the version that lies in ``version_dir``, in place; it must be ``version``."""

    version_dir: str
    version: int
    kv: KvRule


class VersionRef(Record, frozen=True, kw_only=True):
    """A version by number."""

    version: int


class RequestRef(Record, frozen=True, kw_only=True):
    """A request by id."""

    request_id: str


class AttemptRef(Record, frozen=True, kw_only=True):
    """An attempt by id."""

    attempt_id: str


class Nothing(Record, frozen=True, kw_only=True):
    """A request or a reply without content."""


class EngineHealth(Record, frozen=True, kw_only=True):
    """Whether an engine can work. ``detail`` says why not. It can hold ``max_versions`` at a time."""

    replica_id: str
    is_healthy: bool
    is_paused: bool
    versions: tuple[int, ...]
    max_versions: int = 1
    detail: str = ""


GENERATE = StreamingEndpoint("engine.generate", GenerateRequest, GenerateResult, TokenChunk)
LOAD = Endpoint("engine.load", LoadRequest, LoadProof)
UPDATE = Endpoint("engine.update", UpdateRequest, LoadProof)
UNLOAD = Endpoint("engine.unload", VersionRef, Nothing)
PAUSE = Endpoint("engine.pause", Nothing, Nothing)
RESUME = Endpoint("engine.resume", Nothing, Nothing)
ABORT = Endpoint("engine.abort", RequestRef, Nothing)
RELEASE = Endpoint("engine.release", AttemptRef, Nothing)
HEALTH = Endpoint("engine.health", Nothing, EngineHealth)
STATS = Endpoint("engine.stats", Nothing, EngineStats)


class Engine(Protocol):
    """Turns prompts into sampled tokens, and proves whose weights sampled them."""

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """Sample until a stop token, ``max_tokens``, the deadline or an abort; partial tokens are returned.

        Cancelling the call aborts the request. ``on_tokens`` is called in order, before the result, where
        ``request.stream`` is set.

        Raises:
            EngineError: the request can never be served here (its version is not loaded, it is too long).
        """
        ...

    async def load(self, version_dir: str, version: int) -> LoadProof:
        """Load a version beside those held, and prove it.

        Raises:
            IntegrityError: what was loaded is not what was published.
            EngineError: no room for another version.
        """
        ...

    async def update(self, version_dir: str, version: int, kv: KvRule) -> LoadProof:
        """Go over from the newest held version to another one, and prove it.

        Requests that follow updates go on under it from their next token; their result says so in its spans. The
        version before is no longer held. Generation stands still for no longer than the change itself.

        Raises:
            IntegrityError: what was loaded is not what was published. The engine still serves what it served before,
                or, where that is overwritten, is unhealthy.
            EngineError: no version is held, or a request that does not follow updates still uses it.
        """
        ...

    async def unload(self, version: int) -> None:
        """Forget a version and its KV.

        Raises:
            EngineError: the version is not held, or requests still use it.
        """
        ...

    async def pause(self) -> None:
        """Stop computing, keep everything. Deadlines go on."""
        ...

    async def resume(self) -> None:
        """Compute again after :meth:`pause`."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request as ``cancelled``; unknown and finished ones are ignored."""
        ...

    async def release(self, attempt_id: str) -> None:
        """The attempt has ended: its KV may go."""
        ...

    async def health(self) -> EngineHealth:
        """Whether the engine can work. Does not raise for a sick engine; a dead one cannot answer."""
        ...

    async def stats(self) -> EngineStats:
        """Load and counters at this instant."""
        ...


class LoadedVersion(Protocol):
    """A decoder in memory and the manifest that it must agree with."""

    @property
    def module(self) -> Any:
        """A ``transformers`` causal language model."""
        ...

    @property
    def manifest(self) -> Manifest:
        """What was published."""
        ...


class VersionLoader(Protocol):
    """Reads a published version. Synchronous: engines call it in a thread."""

    def load(self, version_dir: str) -> LoadedVersion:
        """Read the directory, verifying file digests and the compatibility of tokenizer and model config.

        Raises:
            IntegrityError: the directory does not hold what its manifest promises.
        """
        ...

    def loaded_digest(self, module: Any) -> str:
        """Digest of the module's parameters as they stand in memory; comparable to ``Manifest.weights_digest``."""
        ...
