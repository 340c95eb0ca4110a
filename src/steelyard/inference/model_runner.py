"""Runs forward passes and samples. Holds several versions of the weights; knows no queues.

Sampling. A token's randomness is one uniform number, a hash of (request seed, position of the token), turned into a
token by inverting the cumulative distribution. So a request gives the same tokens whatever else is in the batch, and
a batch is sampled in a handful of tensor operations.

Recorded for each token: its log-probability after temperature over the full vocabulary, and the log of the mass that
top-p kept. Temperature 0 takes the largest logit and records at temperature 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from steelyard.errors import EngineError
from steelyard.inference.kv_blocks import Admitted, BlockTable, SequenceInfo
from steelyard.inference.kv_cache import ATTENTION_NAME, KVCache, KVLayout, KVShape, Part, cached_attention
from steelyard.inference.scheduler import Batch, Sampled, WorkItem

_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MIX = ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB))
_UNIFORM_BITS = 48
_PROBE_DECODE_TOKENS = 8

AttentionInterface.register(ATTENTION_NAME, cached_attention)


@dataclass(frozen=True)
class Draw:
    """How each row of a batch of logits is sampled; arrays of one length. ``uniforms`` lie in [0, 1)."""

    temperatures: npt.NDArray[np.float32]
    top_ps: npt.NDArray[np.float32]
    uniforms: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Decoder:
    """A causal language model that is ready to run, and what its keys and values look like."""

    module: PreTrainedModel
    shape: KVShape


class ModelRunner:
    """Forward passes of the versions it holds over one key-value cache.

    Args:
        blocks: bookkeeping of the key-value cache, shared with the scheduler.
        max_versions: versions held at once.
        device: where weights and cache live.
    """

    def __init__(self, blocks: BlockTable, *, max_versions: int, device: torch.device) -> None:
        self._blocks = blocks
        self._max_versions = max_versions
        self._device = device
        self._decoders: dict[int, Decoder] = {}
        self._cache: KVCache | None = None

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions held, ascending."""
        return tuple(sorted(self._decoders))

    def prepare(self, module: PreTrainedModel) -> Decoder:
        """Make a decoder ready to run here: evaluation, our device, our attention. Touches nothing that is held.

        May be called in any thread, beside a running pass.

        Raises:
            EngineError: the cache does not compute its kind of attention.
        """
        check_attention(module.config)
        module.eval().requires_grad_(False).to(self._device)
        module.set_attn_implementation(ATTENTION_NAME)
        lay_out_weights(module)
        return Decoder(module, shape_of(module.config, next(module.parameters()).dtype, self._device))

    def install(self, version: int, decoder: Decoder) -> None:
        """Hold a decoder under a version number that is not held yet. The first one decides the shape of the cache.

        Raises:
            EngineError: no room, the number is held, or the decoder does not fit this engine.
        """
        if len(self._decoders) >= self._max_versions:
            raise EngineError(
                f"at most {self._max_versions} versions must be loaded at once, held are {self.versions}; "
                f"unload one before version {version}"
            )
        self._check_fits(version, decoder)
        if self._cache is None:
            self._cache = KVCache(self._blocks, decoder.shape)
        self._decoders[version] = decoder

    def replace(self, old_version: int, version: int, decoder: Decoder) -> None:
        """Hold a decoder in the place of another.

        Raises:
            EngineError: ``old_version`` is not held, ``version`` is, or the decoder does not fit this engine.
        """
        self.decoder(old_version)
        self._check_fits(version, decoder)
        del self._decoders[old_version]
        self._decoders[version] = decoder

    def remove(self, version: int) -> None:
        """Forget a version.

        Raises:
            EngineError: it is not held.
        """
        self.decoder(version)
        del self._decoders[version]

    def decoder(self, version: int) -> Decoder:
        """The decoder of a version.

        Raises:
            EngineError: it is not held.
        """
        decoder = self._decoders.get(version)
        if decoder is None:
            raise EngineError(f"version {version} must be loaded, held are {self.versions}")
        return decoder

    @torch.inference_mode()
    def run(self, batch: Batch) -> Sampled:
        """One forward pass over a batch, and one sampled token for each item that wants one.

        Raises:
            EngineError: the version is not held, or a sequence has no space.
        """
        module = self.decoder(batch.version).module
        if self._cache is None:
            raise EngineError("a version must be loaded before a batch runs")
        parts = [Part(item.sequence_id, item.start, len(item.token_ids)) for item in batch.items]
        layout = self._cache.lay_out(parts)
        ends = layout.ends
        sampled_items = [index for index, item in enumerate(batch.items) if item.is_sampled]
        if not sampled_items:
            # Logits are needed for no token; one is computed because the decoder returns some.
            _forward(module, batch.items, layout, [ends[0]], self._device)
            return Sampled([], [], [])
        logits = _forward(module, batch.items, layout, [ends[index] for index in sampled_items], self._device)
        items = [batch.items[index] for index in sampled_items]
        if not any(item.temperature for item in items):
            return sample_greedy(logits)
        return sample(logits, _draw_for(items))

    def _check_fits(self, version: int, decoder: Decoder) -> None:
        if version in self._decoders:
            raise EngineError(f"version {version} must not be loaded already")
        if self._cache is not None and decoder.shape != self._cache.shape:
            raise EngineError(f"version {version} must have the cache shape {self._cache.shape}, got {decoder.shape}")


@torch.inference_mode()
def probe_logprobs(decoder: Decoder, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probability at temperature 1 of each next token of each sequence, as serving computes it.

    A sequence goes through as two chunks of prefill, and its last tokens one by one through decode, in a cache of its
    own: no request is disturbed, and it may run in any thread.

    Returns:
        For a sequence of L tokens, L - 1 numbers.

    Raises:
        EngineError: there is no sequence, or one has fewer than two tokens.
    """
    if not sequences or min(map(len, sequences)) < 2:
        raise EngineError("a probe must hold sequences of at least two tokens each")
    longest = max(map(len, sequences))
    blocks = BlockTable(
        num_rows=len(sequences), row_tokens=longest, capacity_tokens=(longest + 1) * len(sequences), block_tokens=1
    )
    cache = KVCache(blocks, decoder.shape)
    for index, tokens in enumerate(sequences):
        name, length = f"probe_{index}", len(tokens)
        info = SequenceInfo(name, name, "probe", 0, tuple(tokens), length, length, ())
        if not isinstance(blocks.admit(info), Admitted):
            raise EngineError(f"probe sequence {index} must fit into its own cache")
    found: list[list[float]] = [[] for _ in sequences]
    starts = [0] * len(sequences)
    while any(start < len(tokens) - 1 for start, tokens in zip(starts, sequences, strict=True)):
        _probe_step(decoder, cache, sequences, starts, found)
    return found


def _probe_step(
    decoder: Decoder,
    cache: KVCache,
    sequences: Sequence[Sequence[int]],
    starts: list[int],
    found: list[list[float]],
) -> None:
    items, owners, targets = [], [], []
    for index, tokens in enumerate(sequences):
        start = starts[index]
        if start >= len(tokens) - 1:
            continue
        end = _probe_end(start, len(tokens))
        items.append(WorkItem(f"probe_{index}", tuple(tokens[start:end]), start, True, 1.0, 1.0, 0))
        owners.append(index)
        targets.append(list(tokens[start + 1 : end + 1]))
        starts[index] = end
    parts = [Part(item.sequence_id, item.start, len(item.token_ids)) for item in items]
    layout = cache.lay_out(parts)
    wanted = [
        position
        for end, part in zip(layout.ends, parts, strict=True)
        for position in range(end - part.num_tokens + 1, end + 1)
    ]
    device = decoder.shape.device
    logits = _forward(decoder.module, items, layout, wanted, device)
    flat = torch.tensor([token for target in targets for token in target], device=device)
    logprobs = torch.log_softmax(logits, -1).gather(1, flat[:, None])[:, 0].tolist()
    position = 0
    for owner, target in zip(owners, targets, strict=True):
        found[owner].extend(logprobs[position : position + len(target)])
        position += len(target)


def _probe_end(start: int, num_tokens: int) -> int:
    """Where the piece of a probe sequence that begins at ``start`` ends."""
    prefill = max(1, num_tokens - _PROBE_DECODE_TOKENS)
    if start >= prefill:
        return start + 1
    return max(1, prefill // 2) if start == 0 else prefill


@torch.no_grad()
def lay_out_weights(module: PreTrainedModel) -> None:
    """Store the matrices of linear layers with their columns together, on a CPU.

    Shapes and values stay as they are, to the last bit; only the strides change. Small batches are multiplied up to a
    fifth faster so, because the library need not rearrange the matrix each time. A matrix that is also the embedding
    stays as it is, because that one is read by rows.
    """
    if module.device.type != "cpu":
        return
    embedding = module.get_input_embeddings().weight
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.weight is not embedding:
            layer.weight.data = layer.weight.data.t().contiguous().t()


def check_attention(config: Any) -> None:
    """Refuse decoders whose attention the cache does not compute.

    Raises:
        EngineError: a layer's attention is not full causal.
    """
    settings = config.to_dict()
    kinds = set(settings.get("layer_types") or ["full_attention"])
    windowed = settings.get("sliding_window") is not None and settings.get("use_sliding_window", True)
    if kinds != {"full_attention"} or (windowed and not settings.get("layer_types")):
        raise EngineError(
            f"the local engine serves decoders with full attention in every layer, got layer_types {sorted(kinds)} "
            f"and sliding_window {settings.get('sliding_window')}"
        )


def shape_of(config: Any, dtype: torch.dtype, device: torch.device) -> KVShape:
    """Shape of one token's keys and values in a decoder of this configuration."""
    settings = config.to_dict()
    num_heads = int(settings["num_attention_heads"])
    return KVShape(
        num_layers=int(settings["num_hidden_layers"]),
        num_kv_heads=int(settings.get("num_key_value_heads") or num_heads),
        head_dim=int(settings.get("head_dim") or settings["hidden_size"] // num_heads),
        dtype=dtype,
        device=device,
    )


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), a function of (seed, position) alone.

    The output of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") at step
    ``position`` of the stream that starts at the mixed seed.
    """
    state = _mix(seeds) + positions * np.uint64(_GOLDEN)
    return (_mix(state) >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) * 2.0**-_UNIFORM_BITS


def sample(logits: Tensor, draw: Draw) -> Sampled:
    """One token for each row of ``logits`` [num_rows, vocabulary], float32."""
    greedy = draw.temperatures == 0.0
    device = logits.device
    temperatures = np.where(greedy, np.float32(1.0), draw.temperatures)
    if (temperatures != 1.0).any():
        logits = logits / torch.from_numpy(temperatures).to(device)[:, None]
    logprobs = torch.log_softmax(logits, -1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    chosen = _invert(cumulative, torch.from_numpy(draw.uniforms).to(device)[:, None])
    kept = torch.zeros(len(logits), 1, dtype=logprobs.dtype, device=device)
    nucleus = np.flatnonzero((draw.top_ps < 1.0) & ~greedy)
    if len(nucleus):
        rows = torch.from_numpy(nucleus).to(device)
        chosen[rows], kept[rows] = _sample_nucleus(logprobs[rows], draw, nucleus)
    if greedy.any():
        rows = torch.from_numpy(np.flatnonzero(greedy)).to(device)
        chosen[rows] = _argmax(logits[rows])
    return _to_lists(chosen, logprobs.gather(1, chosen), kept)


def sample_greedy(logits: Tensor) -> Sampled:
    """What :func:`sample` gives where every temperature is 0, for less work."""
    best = _argmax(logits)
    # The chosen logit is the largest, so this is the log of the softmax and cannot overflow.
    logprobs = (logits - logits.gather(1, best)).exp_().sum(-1, keepdim=True).log_().neg_()
    return _to_lists(best, logprobs, torch.zeros_like(logprobs))


def _argmax(logits: Tensor) -> Tensor:
    """Index of the first largest of each row, [num_rows, 1]; numpy's is several times faster on a CPU."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))[:, None]
    return logits.argmax(-1, keepdim=True)


def _sample_nucleus(logprobs: Tensor, draw: Draw, rows: npt.NDArray[np.intp]) -> tuple[Tensor, Tensor]:
    """Token and log kept mass, [num_rows, 1] each, under top-p (Holtzman et al. 2020, arXiv 1904.09751).

    Kept are the most likely tokens up to and with the one that brings their mass to ``top_p``.
    """
    device = logprobs.device
    ordered = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    cumulative = ordered.values.exp().cumsum(-1, dtype=torch.float64)
    top_p = torch.from_numpy(draw.top_ps[rows].astype(np.float64)).to(device)[:, None]
    num_kept = torch.searchsorted(cumulative, top_p).clamp_(max=logprobs.shape[-1] - 1)
    mass = cumulative.gather(1, num_kept)
    target = torch.from_numpy(draw.uniforms[rows]).to(device)[:, None] * mass
    position = torch.searchsorted(cumulative, target, right=True)
    return ordered.indices.gather(1, position), mass.log().clamp_(max=0.0).to(logprobs.dtype)


def _invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """First index whose cumulative mass exceeds ``uniform`` of the total: never a token without mass."""
    # float64, and uniforms of 48 bits: the product stays below the total.
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)


def _to_lists(token_ids: Tensor, logprobs: Tensor, kept_logmass: Tensor) -> Sampled:
    """[num_rows, 1] each, moved to Python in one transfer. Token ids are exact in float64."""
    together = torch.cat((token_ids.double(), logprobs.double(), kept_logmass.double()), 1).T.tolist()
    return Sampled([int(token_id) for token_id in together[0]], together[1], together[2])


def _draw_for(items: list[WorkItem]) -> Draw:
    seeds = np.array([item.seed for item in items], dtype=np.uint64)
    positions = np.array([item.start + len(item.token_ids) for item in items], dtype=np.uint64)
    return Draw(
        temperatures=np.array([item.temperature for item in items], dtype=np.float32),
        top_ps=np.array([item.top_p for item in items], dtype=np.float32),
        uniforms=uniforms(seeds, positions),
    )


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for shift, factor in _MIX:
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return state ^ (state >> np.uint64(31))


def _forward(
    module: PreTrainedModel, items: Sequence[WorkItem], layout: KVLayout, wanted: list[int], device: torch.device
) -> Tensor:
    """Logits [len(wanted), vocabulary] in float32 after the tokens ``wanted`` of the flattened batch."""
    token_ids = [token_id for index in layout.order for token_id in items[index].token_ids]
    output = module(
        input_ids=_long_tensor(token_ids, device)[None],
        position_ids=layout.positions[None],
        use_cache=False,
        logits_to_keep=_long_tensor(wanted, device),
        kv_layout=layout,
    )
    logits: Tensor = output.logits[0]
    return logits.float()


def _long_tensor(numbers: list[int], device: torch.device) -> Tensor:
    """int64 tensor of a list; through numpy, which reads lists faster."""
    tensor = torch.from_numpy(np.array(numbers, dtype=np.int64))
    return tensor if device.type == "cpu" else tensor.to(device)
