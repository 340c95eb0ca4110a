"""What the emulated engine says: seeded tokens, and log-probabilities that depend on the version. Imports no torch."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from steelyard.errors import IntegrityError
from steelyard.types import FinishReason, GenerateRequest

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LengthModel:
    """How many tokens a request samples until it stops by itself: log-normal, as answers of real models roughly are."""

    median_tokens: float
    sigma: float

    def draw(self, rng: np.random.Generator) -> int:
        """At least 1."""
        return max(1, round(self.median_tokens * math.exp(self.sigma * float(rng.standard_normal()))))


def plain_token_ids(version_dir: str) -> TokenIds:
    """The ids that a version's tokenizer can turn into text, without its control tokens.

    Raises:
        IntegrityError: the directory has no tokenizer.json with a vocabulary.
    """
    path = Path(version_dir) / "tokenizer.json"
    try:
        tokenizer = json.loads(path.read_bytes())
        vocabulary = tokenizer["model"]["vocab"]
        numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        control = {int(token["id"]) for token in tokenizer.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path} must be a tokenizer with a vocabulary: {error}") from error
    return np.array(sorted({int(number) for number in numbers} - control), dtype=np.int64)


def seeded_tokens(
    request: GenerateRequest, token_ids: TokenIds, lengths: LengthModel
) -> tuple[tuple[int, ...], FinishReason]:
    """All tokens of a request, fixed by its seed (by its id where it has none, by its prompt where it is greedy)."""
    sampling = request.sampling
    rng = np.random.default_rng(_seed(request))
    length = lengths.draw(rng)
    stops = length <= sampling.max_tokens and bool(request.stop_token_ids)
    num_plain = length - 1 if stops else sampling.max_tokens
    plain = token_ids[rng.integers(len(token_ids), size=num_plain)].tolist()
    if stops:
        return (*plain, request.stop_token_ids[0]), FinishReason.STOP
    return tuple(plain), FinishReason.LENGTH


def emulated_logprobs(version: int, first_position: int, token_ids: tuple[int, ...]) -> list[float]:
    """One number for each token at its position of the sequence: below 0, exponential with mean 1, exact.

    They are what a pure function of (version, position, token) says; no model is behind them.
    """
    positions = np.arange(first_position, first_position + len(token_ids), dtype=np.uint64)
    mixed = _mix(np.array(token_ids, dtype=np.uint64) ^ _mix(positions ^ _mix(np.full(1, version, dtype=np.uint64))))
    uniform = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
    logprobs: list[float] = np.log1p(-uniform).tolist()
    return logprobs


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _seed(request: GenerateRequest) -> int:
    sampling = request.sampling
    if sampling.temperature == 0:
        return int(xxhash.xxh3_64_intdigest(np.array(request.prompt_token_ids, dtype=np.int64).tobytes()))
    if sampling.seed is not None:
        return sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
    return int(xxhash.xxh3_64_intdigest(request.request_id.encode()))
