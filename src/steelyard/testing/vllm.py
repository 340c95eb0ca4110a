"""A real vLLM server under test: a small policy, published versions of it, and the engine that drives it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import torch
import transformers

from steelyard.clock import SystemClock
from steelyard.ids import RandomIds
from steelyard.inference.vllm_api import KEPT_ALIVE_S, VllmApi
from steelyard.inference.vllm_engine import VllmEngine, VllmSettings
from steelyard.inference.vllm_loading import VersionReader
from steelyard.inference.vllm_server import ServerSettings, VllmServer
from steelyard.testing.tokenizer import write_tokenizer
from steelyard.weights.publisher import VersionPublisher
from steelyard.weights.reader import VersionReader as StoredVersionReader

TOLERANCE = 1e-4
_START_DEADLINE_S = 300.0
_STOP_DEADLINE_S = 15.0
_NAME = "rep_vllm"


def odd_policy(seed: int = 0, vocab_size: int = 272) -> torch.nn.Module:
    """A decoder with everything that vLLM lays out in its own way: grouped-query attention with biases, an output
    matrix of its own, and a vocabulary that is no multiple of 64."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        attention_bias=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return module.eval()


@dataclass
class PublishedPolicies:
    """Versions of :func:`odd_policy` in ``folder``; version v has seed v."""

    folder: Path
    modules: dict[int, torch.nn.Module] = field(default_factory=dict)
    dirs: dict[int, str] = field(default_factory=dict)

    def publish(self, versions: range) -> "PublishedPolicies":
        """Publish versions one after the other."""
        model_dir = self.folder / "model"
        model_dir.mkdir(parents=True)
        write_tokenizer(model_dir, vocab_size=256)
        odd_policy().save_pretrained(model_dir)  # type: ignore[operator]
        publisher = VersionPublisher(self.folder / "weights", model_dir, TOLERANCE)
        (self.folder / "weights").mkdir()
        for version in versions:
            module = odd_policy(seed=version)
            parent = version - 1 if version > versions.start else None
            publisher.publish(module, version=version, step=version, parent_version=parent)
            self.modules[version] = module
            self.dirs[version] = str(self.folder / "weights" / f"v{version:06d}")
        return self

    @torch.no_grad()
    def logprobs(
        self, version: int, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float
    ) -> list[float]:
        """What the trainer's own module gives each of ``tokens`` after ``prompt``."""
        ids = torch.tensor([[*prompt, *tokens]])
        logits = self.modules[version](input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])
        return [float(one) for one in chosen.squeeze(-1)]


@dataclass
class VllmLab:
    """A running server. :meth:`engine` makes an engine on it that holds nothing yet."""

    server: VllmServer
    api: VllmApi

    def engine(self, reader: VersionReader | None = None) -> VllmEngine:
        """A new engine; only one of them may be in use at a time."""
        return VllmEngine(
            self.api,
            reader or StoredVersionReader(),
            VllmSettings(probe_tolerance=TOLERANCE),
            replica_id=_NAME,
            clock=SystemClock(),
            ids=RandomIds(),
        )


@asynccontextmanager
async def running_vllm(python: Path, model_dir: str, folder: Path, max_model_len: int = 8192) -> AsyncIterator[VllmLab]:
    """Start a server on the policy in ``model_dir``; it is gone at the end of the block."""
    socket_path = folder / "vllm.sock"
    settings = ServerSettings(
        python=str(python),
        model_dir=model_dir,
        dtype="float32",
        max_model_len=max_model_len,
        max_running=16,
        kv_cache_bytes=64 << 20,
    )
    async with aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(socket_path), keepalive_timeout=KEPT_ALIVE_S)
    ) as session:
        api = VllmApi(session, "http://vllm", f"vllm of {_NAME}", call_deadline_s=30.0)
        server = await VllmServer.start(_NAME, settings, socket_path, folder / "vllm.log")
        try:
            await server.wait_until_ready(api, _START_DEADLINE_S)
            yield VllmLab(server, api)
        finally:
            await server.stop(_STOP_DEADLINE_S)
