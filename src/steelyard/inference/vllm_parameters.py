"""Where the published parameters stand in the memory of a vLLM worker. Imports no torch.

vLLM fuses the three projections of attention into one matrix, and gate and up of the feed-forward part into another,
one below the other; and it fills the vocabulary up with rows of zeros. The map here is declared, not guessed from
what is found: a parameter in memory that it does not explain is an error, so nothing can serve unproven.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from steelyard.errors import IntegrityError
from steelyard.types import ParameterDigest

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules of vLLM's decoders that hold several published modules, in the order of their rows."""

VOCABULARY = ("embed_tokens", "lm_head")
"""Modules whose rows vLLM fills up with zeros to a round number."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """``number`` rows from ``first`` on of ``memory_name``: what was published as ``name``; None is padding.

    ``number`` -1 is the whole parameter.
    """

    name: str | None
    memory_name: str
    first: int = 0
    number: int = -1


@dataclass(frozen=True, kw_only=True)
class Described:
    """A run of rows as it stands in memory."""

    dtype: str
    digest: str
    is_zero: bool
    shape: tuple[int, ...]


def map_parameters(
    published: Iterable[ParameterDigest], memory: Mapping[str, Sequence[int]], version: int
) -> tuple[Rows, ...]:
    """Where each published parameter stands.

    Args:
        memory: shapes of what a worker holds, by name.

    Raises:
        IntegrityError: a published parameter stands nowhere, or something in memory was not published.
    """
    shapes = {one.name: one.shape for one in published}
    runs: list[Rows] = []
    for memory_name, shape in memory.items():
        runs.extend(_rows_of(memory_name, tuple(shape), shapes, version))
    mapped = {run.name for run in runs}
    for name in shapes:
        if name not in mapped:
            raise IntegrityError(f"version {version}: parameter {name} is missing in the memory of vLLM")
    return tuple(runs)


def found_parameters(runs: Sequence[Rows], described: Sequence[Described], version: int) -> tuple[ParameterDigest, ...]:
    """What a worker holds, in the words of a manifest.

    Raises:
        IntegrityError: padding is not all zeros.
    """
    found = []
    for run, one in zip(runs, described, strict=True):
        if run.name is not None:
            found.append(ParameterDigest(name=run.name, shape=one.shape, dtype=one.dtype, digest=one.digest))
        elif not one.is_zero:
            raise IntegrityError(
                f"version {version}: rows {run.first} and on of {run.memory_name} are padding of vLLM's and must be 0"
            )
    return tuple(found)


def _rows_of(
    memory_name: str, shape: tuple[int, ...], published: Mapping[str, tuple[int, ...]], version: int
) -> list[Rows]:
    prefix, _, module, kind = _split(memory_name)
    parts = FUSED.get(module)
    if parts is not None and memory_name not in published:
        return _stacked(memory_name, shape, [f"{prefix}{part}.{kind}" for part in parts], published, version)
    wanted = published.get(memory_name)
    if wanted is None:
        raise IntegrityError(f"version {version}: parameter {memory_name} in the memory of vLLM was not published")
    if module in VOCABULARY and shape[0] > wanted[0]:
        return [
            Rows(name=memory_name, memory_name=memory_name, first=0, number=wanted[0]),
            Rows(name=None, memory_name=memory_name, first=wanted[0], number=shape[0] - wanted[0]),
        ]
    return [Rows(name=memory_name, memory_name=memory_name)]


def _stacked(
    memory_name: str,
    shape: tuple[int, ...],
    names: list[str],
    published: Mapping[str, tuple[int, ...]],
    version: int,
) -> list[Rows]:
    runs, first = [], 0
    for name in names:
        if name not in published:
            raise IntegrityError(f"version {version}: {memory_name} of vLLM holds {name}, which was not published")
        number = published[name][0]
        runs.append(Rows(name=name, memory_name=memory_name, first=first, number=number))
        first += number
    if first != shape[0]:
        raise IntegrityError(
            f"version {version}: {memory_name} of vLLM must have {first} rows for {', '.join(names)}, got {shape[0]}"
        )
    return runs


def _split(memory_name: str) -> tuple[str, str, str, str]:
    """``model.layers.0.self_attn.`` | ``.`` | ``qkv_proj`` | ``weight``."""
    path, _, kind = memory_name.rpartition(".")
    prefix, dot, module = path.rpartition(".")
    return f"{prefix}{dot}", dot, module, kind
