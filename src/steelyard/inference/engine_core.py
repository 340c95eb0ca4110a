"""The synchronous half of the local engine: scheduler, key-value cache and model runner joined, one step at a time.

Versions come in two moves. :meth:`EngineCore.prove` makes a decoder ready and proves it, in any thread, beside
generation. Then :meth:`EngineCore.hold` lets it serve beside those that are held, or :meth:`EngineCore.swap` lets it
serve in the place of the newest one and takes along the requests that follow updates.
"""

import logging
import math
from dataclasses import dataclass

import torch

from steelyard.clock import Clock
from steelyard.errors import EngineError, IntegrityError
from steelyard.ids import IdSource
from steelyard.inference.engine import KvRule, LoadedVersion, VersionLoader
from steelyard.inference.kv_blocks import BlockTable
from steelyard.inference.model_runner import Decoder, ModelRunner, probe_logprobs
from steelyard.inference.scheduler import Batch, Scheduler, result_of
from steelyard.types import EngineStats, GenerateRequest, GenerateResult, LoadProof, TokenChunk

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes of a local engine.

    ``max_versions`` is ``max_policy_lag + 2``. ``row_tokens`` is the longest sequence. ``kv_tokens`` bounds what is
    reserved; rows are strips of address space, of which only the written part takes memory. ``answer_deadline_s`` is
    how long the front waits for its thread beyond a request's own deadline.
    """

    max_running: int = 64
    row_tokens: int = 1024
    kv_tokens: int = 131_072
    prefill_chunk_tokens: int = 512
    max_versions: int = 3
    probe_tolerance: float = 1e-4
    answer_deadline_s: float = 30.0
    device: str = "cpu"

    @property
    def num_rows(self) -> int:
        """Twice what runs at once, or as many as ``kv_tokens`` fills: room for sequences between two turns."""
        return max(2 * self.max_running, self.kv_tokens // self.row_tokens)


@dataclass(frozen=True)
class ProvenVersion:
    """A decoder that is what was published, and the proof; not yet held."""

    decoder: Decoder
    proof: LoadProof


class EngineCore:
    """One step at a time, in one thread. Only that thread may call it, but for :meth:`prove`."""

    def __init__(
        self, settings: EngineSettings, loader: VersionLoader, *, replica_id: str, clock: Clock, ids: IdSource
    ) -> None:
        self.settings = settings
        self.replica_id = replica_id
        self._loader = loader
        self._clock = clock
        self._ids = ids
        self._blocks = BlockTable(
            num_rows=settings.num_rows, row_tokens=settings.row_tokens, capacity_tokens=settings.kv_tokens
        )
        self.scheduler = Scheduler(
            self._blocks, max_running=settings.max_running, prefill_chunk_tokens=settings.prefill_chunk_tokens
        )
        self._runner = ModelRunner(
            self._blocks, max_versions=settings.max_versions, device=torch.device(settings.device)
        )
        self._proofs: dict[int, LoadProof] = {}
        self._results: list[GenerateResult] = []
        self._busy_s = 0.0

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that can serve, ascending."""
        return self._runner.versions

    def add(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            EngineError: its version is not held, or it can never be served.
        """
        version = request.policy_version
        if request.follows_updates:
            version = max(self._proofs, default=version)
        if version not in self._proofs or version < request.policy_version:
            raise EngineError(
                f"request {request.request_id}: policy_version{' or a later one' * request.follows_updates} must be "
                f"loaded in {self.replica_id}, got {request.policy_version}, held are {self.versions}"
            )
        self.scheduler.add(request, self._clock.now_s(), version=version)

    def abort(self, request_id: str) -> None:
        """End a request as cancelled."""
        self.scheduler.abort(request_id, self._clock.now_s())

    def step(self) -> tuple[list[TokenChunk], list[GenerateResult]]:
        """Compute one step for every version; returns new tokens of streaming requests, and ended requests."""
        started_s = self._clock.now_s()
        chunks: list[TokenChunk] = []
        batches = self.scheduler.plan(started_s)
        for batch in batches:
            chunks.extend(self._run_batch(batch))
        if batches:
            self._busy_s += self._clock.now_s() - started_s
        return chunks, self.take_results()

    def take_results(self) -> list[GenerateResult]:
        """Requests that have ended since the last call."""
        self._collect_results()
        results, self._results = self._results, []
        return results

    def prove(self, loaded: LoadedVersion, version: int, started_s: float) -> ProvenVersion:
        """Make a decoder ready to run here, and prove by digest and probe that it is ``version``; it is not held yet.

        Raises:
            IntegrityError: number, loaded digest or probe do not agree with the manifest.
            EngineError: the decoder does not fit this engine.
        """
        manifest, tolerance = loaded.manifest, self.settings.probe_tolerance
        if manifest.version != version:
            raise IntegrityError(f"manifest.version must be {version}, got {manifest.version}")
        decoder = self._runner.prepare(loaded.module)
        digest = self._loader.loaded_digest(decoder.module)
        if digest != manifest.weights_digest:
            raise IntegrityError(
                f"version {version}: the digest of the loaded parameters must be {manifest.weights_digest}, "
                f"got {digest}"
            )
        error = probe_error(probe_logprobs(decoder, manifest.probe.sequences), manifest.probe.logprobs)
        # Not "error > tolerance": a probe that gives NaN must fail too.
        if not error <= tolerance:
            raise IntegrityError(
                f"version {version}: probe log-probabilities must agree within {tolerance}, "
                f"largest difference is {error}"
            )
        proof = LoadProof(
            version=version,
            replica_id=self.replica_id,
            load_id=self._ids.new("load"),
            weights_digest=digest,
            probe_max_error=error,
            probe_tolerance=tolerance,
            loaded_in_s=self._clock.now_s() - started_s,
        )
        return ProvenVersion(decoder, proof)

    def hold(self, proven: ProvenVersion) -> LoadProof:
        """Serve a version beside those that are held; returns the proof that it goes by from now on.

        Raises:
            IntegrityError: it is held already, with other weights.
            EngineError: no room.
        """
        proof = proven.proof
        if (held := self._held_proof(proof)) is not None:
            return held
        self._runner.install(proof.version, proven.decoder)
        self._proofs[proof.version] = proof
        return proof

    def check_update(self, version: int) -> None:
        """Refuse an update that :meth:`swap` would refuse now.

        Raises:
            EngineError: no version is held, a later one is, or requests need the newest one to stay.
        """
        newest = max(self._proofs, default=None)
        if newest is None:
            raise EngineError(f"a version must be held to be updated to version {version}")
        if version < newest:
            raise EngineError(f"an update must go to a later version than {newest}, got {version}")
        num_pinned = 0 if version == newest else self.scheduler.num_pinned(newest)
        if num_pinned:
            raise EngineError(
                f"version {newest} must have no requests that need it to the end to be updated to version {version}, "
                f"got {num_pinned}"
            )

    def swap(self, proven: ProvenVersion, kv: KvRule) -> LoadProof:
        """Serve a version in the place of the newest one; requests that follow updates go on under it.

        Raises:
            IntegrityError: it is held already, with other weights.
            EngineError: see :meth:`check_update`.
        """
        proof = proven.proof
        self.check_update(proof.version)
        if (held := self._held_proof(proof)) is not None:
            return held
        newest = max(self._proofs)
        self._collect_results()
        self._runner.replace(newest, proof.version, proven.decoder)
        self._proofs[proof.version] = proof
        del self._proofs[newest]
        self.scheduler.follow(proof.version, kv)
        self._blocks.drop_version(newest)
        return proof

    def unload(self, version: int) -> None:
        """Forget a version and its KV.

        Raises:
            EngineError: it is not held, or requests use it.
        """
        num_using = self.scheduler.num_using(version)
        if num_using:
            raise EngineError(f"version {version} must have no open requests to be unloaded, got {num_using}")
        self._collect_results()
        self._runner.remove(version)
        del self._proofs[version]
        self._blocks.drop_version(version)

    def stats(self) -> EngineStats:
        """Load and counters at this instant."""
        return EngineStats(
            replica_id=self.replica_id,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            kv_tokens_in_use=self._blocks.tokens_in_use,
            kv_tokens_capacity=self._blocks.capacity_tokens,
            prefill_tokens=self.scheduler.prefill_tokens,
            decode_tokens=self.scheduler.decode_tokens,
            cached_tokens=self.scheduler.cached_tokens,
            busy_s=self._busy_s,
            versions=self.versions,
            num_evicted=self.scheduler.num_evicted,
            evicted_tokens=self.scheduler.evicted_tokens,
        )

    def _run_batch(self, batch: Batch) -> list[TokenChunk]:
        try:
            sampled = self._runner.run(batch)
        except Exception as error:
            # What is in the cache for these sequences is unknown now; they end, and the others go on.
            logger.exception("a forward pass of version %d failed", batch.version)
            detail = f"{self.replica_id}: the forward pass failed with {type(error).__name__}: {error}"
            self.scheduler.fail([item.sequence_id for item in batch.items], self._clock.now_s(), detail)
            return []
        return self.scheduler.commit(batch, sampled, self._clock.now_s())

    def _collect_results(self) -> None:
        """Write the results of what has ended, while the proofs of their versions are there."""
        self._results.extend(
            result_of(
                finished,
                replica_id=self.replica_id,
                load_id=self._proofs[finished.state.info.version].load_id,
            )
            for finished in self.scheduler.take_finished()
        )

    def _held_proof(self, proof: LoadProof) -> LoadProof | None:
        held = self._proofs.get(proof.version)
        if held is not None and held.weights_digest != proof.weights_digest:
            raise IntegrityError(
                f"version {proof.version} must keep weights_digest {held.weights_digest}, got {proof.weights_digest}"
            )
        return held


def probe_error(found: list[list[float]], expected: tuple[tuple[float, ...], ...]) -> float:
    """Largest absolute difference of two sets of log-probabilities; NaN if any number is NaN.

    Raises:
        IntegrityError: their shapes differ.
    """
    if [len(row) for row in found] != [len(row) for row in expected]:
        raise IntegrityError(
            f"probe.logprobs must hold one number for each next token, {[len(row) for row in found]}, "
            f"got {[len(row) for row in expected]}"
        )
    differences = [
        abs(left - right)
        for found_row, expected_row in zip(found, expected, strict=True)
        for left, right in zip(found_row, expected_row, strict=True)
    ]
    # max() would pass over a NaN that does not come first.
    return float("nan") if any(math.isnan(value) for value in differences) else max(differences)
