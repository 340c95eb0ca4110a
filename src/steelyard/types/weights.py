"""What a policy version promises, and how a replica proves that it holds it."""

from steelyard.types.record import Record


class FileDigest(Record, frozen=True, kw_only=True):
    """One file of a version, by name inside its directory."""

    name: str
    num_bytes: int
    digest: str


class ParameterDigest(Record, frozen=True, kw_only=True):
    """One parameter as published: digest over its contiguous bytes in ``dtype``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str


class WeightDigests(Record, frozen=True, kw_only=True):
    """``weights``: one digest over all ``parameters``, whatever their order."""

    weights: str
    parameters: tuple[ParameterDigest, ...]


class Probe(Record, frozen=True, kw_only=True):
    """Fixed token sequences with the trainer's own log-probabilities of each next token.

    ``sequences[i]`` has length L_i, ``logprobs[i]`` length L_i - 1. ``separates_parent`` says whether
    the parent's log-probabilities differ by more than the tolerance, so that the probe can tell them apart.
    """

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    separates_parent: bool


class Manifest(Record, frozen=True, kw_only=True):
    """What a version number promises. Written last; a directory without it is no version."""

    version: int
    step: int
    parent_version: int | None
    files: tuple[FileDigest, ...]
    parameters: tuple[ParameterDigest, ...]
    weights_digest: str
    model_config_digest: str
    tokenizer_digest: str
    template_digest: str
    dtype: str
    probe: Probe


class LoadProof(Record, frozen=True, kw_only=True):
    """A replica's proof that what is in its memory is what was published."""

    version: int
    replica_id: str
    load_id: str
    weights_digest: str
    probe_max_error: float
    probe_tolerance: float
    loaded_in_s: float
