"""The arithmetic of a configuration: everything that can be known to be impossible before a start.

Each rule says what must hold and what came instead, and what would fit where that can be computed.
"""

import math
import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, urlsplit

from steelyard.config import (
    BlobsConfig,
    Config,
    EmulatedConfig,
    HarnessConfig,
    JournalConfig,
    ResourcesConfig,
    RouterConfig,
    SchedulerConfig,
)
from steelyard.errors import ConfigError

_NAME = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
_BLOBS_URL = re.compile(rf"s3://[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9](/{_NAME})*/?|file://(/{_NAME})+/?")
_MAX_NAME_CHARS = 200
_MIN_KV_CACHE_BYTES = 16 << 20
_MIN_VLLM_TEMPERATURE = 0.01
"""Below it vLLM samples at another temperature than was asked for."""
_VLLM_ARGUMENTS = frozenset(
    {
        *("--model", "--tokenizer", "--served-model-name", "--load-format", "--dtype", "--quantization", "-q"),
        *("--uds", "--host", "--port", "--api-key", "--worker-extension-cls", "--speculative-config"),
        *("--max-model-len", "--max-num-seqs", "--block-size", "--kv-cache-memory-bytes"),
        *("--logprobs-mode", "--generation-config"),
        *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"),
    }
)
"""What decides which weights serve, how tokens are sampled and stamped, and who reaches the server."""


def check(config: Config, *, is_live: bool = True) -> None:
    """Check every rule.

    Args:
        is_live: it is to be run, so nothing may be asked for that only a simulation has.

    Raises:
        ConfigError: the first rule that is broken, in the words of the field.
    """
    for problem in _problems(config):
        raise ConfigError(problem)
    for problem in _not_available(config) if is_live else ():
        raise ConfigError(problem)


def _problems(config: Config) -> Iterator[str]:
    yield from _minimums(config)
    yield from _ranges(config)
    yield from _batch_arithmetic(config)
    yield from _room(config)
    yield from _weights(config)
    yield from _workers(config)
    yield from _harness(config.harness)
    yield from _blobs(config.blobs)
    yield from _journal(config.journal)
    yield from _vllm(config)
    yield from _router(config.inference.router)
    yield from _emulated(config.inference.emulated)
    yield from _scheduler(config.scheduler, config.resources)


def _minimums(config: Config) -> Iterator[str]:
    at_least: dict[str, tuple[float, float]] = {
        "resources.rollout_gpus": (config.resources.rollout_gpus, 1),
        "resources.train_gpus": (config.resources.train_gpus, 1),
        "resources.reward_gpus": (config.resources.reward_gpus, 0),
        "runtime.max_restarts": (config.runtime.max_restarts, 0),
        "rollout.num_workers": (config.rollout.num_workers, 0),
        "rollout.group_size": (config.rollout.group_size, 2),
        "rollout.max_turns": (config.rollout.max_turns, 1),
        "rollout.max_tokens": (config.rollout.max_tokens, 1),
        "rollout.max_concurrent": (config.rollout.max_concurrent, 1),
        "rollout.max_attempts": (config.rollout.max_attempts, 1),
        "rollout.temperature": (config.rollout.temperature, 0),
        "harness.max_open_files": (config.harness.max_open_files, 16),
        "sandbox.max_open_files": (config.sandbox.max_open_files, 16),
        "algorithm.min_scored": (config.algorithm.min_scored, 2),
        "algorithm.kl_coef": (config.algorithm.kl_coef, 0),
        "algorithm.entropy_coef": (config.algorithm.entropy_coef, 0),
        "admission.max_policy_lag": (config.admission.max_policy_lag, 0),
        "admission.max_stale_retries": (config.admission.max_stale_retries, 0),
        "train.batch_size": (config.train.batch_size, 1),
        "train.grad_accum_steps": (config.train.grad_accum_steps, 1),
        "train.max_steps": (config.train.max_steps, 0),
        "train.checkpoint_every": (config.train.checkpoint_every, 1),
        "train.keep_checkpoints": (config.train.keep_checkpoints, 1),
        "train.warmup_steps": (config.train.warmup_steps, 0),
        "train.weight_decay": (config.train.weight_decay, 0),
        "inference.max_running": (config.inference.max_running, 1),
        "inference.prefill_chunk_tokens": (config.inference.prefill_chunk_tokens, 1),
        "sandbox.max_processes": (config.sandbox.max_processes, 1),
        "sandbox.memory_bytes": (config.sandbox.memory_bytes, 64 << 20),
        "sandbox.max_output_bytes": (config.sandbox.max_output_bytes, 1),
        "sandbox.max_file_bytes": (config.sandbox.max_file_bytes, 4096),
        "sandbox.max_disk_bytes": (config.sandbox.max_disk_bytes, config.sandbox.max_file_bytes),
        "sandbox.num_warm": (config.sandbox.num_warm, 0),
        "sandbox.max_alive": (config.sandbox.max_alive, max(1, config.sandbox.num_warm)),
        "scoring.num_workers": (config.scoring.num_workers, 0),
        "scoring.concurrency": (config.scoring.concurrency, 1),
        "scoring.max_attempts": (config.scoring.max_attempts, 1),
        "blobs.max_tries": (config.blobs.max_tries, 1),
        "weights.max_shard_bytes": (config.weights.max_shard_bytes, 1),
        "journal.snapshot_every_events": (config.journal.snapshot_every_events, 1),
        "journal.lease_s": (config.journal.lease_s, 1),
        "eval.num_tasks": (config.eval.num_tasks, 0),
        "eval.num_unseen_templates": (config.eval.num_unseen_templates, 0),
        "gateway.port": (config.gateway.port, 0),
        "coordinator.port": (config.coordinator.port or 0, 0),
    }
    for name, (value, minimum) in at_least.items():
        if not value >= minimum:
            yield f"{name} must be >= {minimum:g}, got {value}"


def _ranges(config: Config) -> Iterator[str]:
    positive = {
        "train.learning_rate": config.train.learning_rate,
        "train.max_grad_norm": config.train.max_grad_norm,
        "train.step_deadline_s": config.train.step_deadline_s,
        "rollout.lease_s": config.rollout.lease_s,
        "rollout.turn_deadline_s": config.rollout.turn_deadline_s,
        "admission.max_tail_wait_s": config.admission.max_tail_wait_s,
        "admission.priority_ageing_s": config.admission.priority_ageing_s,
        "sandbox.call_deadline_s": config.sandbox.call_deadline_s,
        "sandbox.start_deadline_s": config.sandbox.start_deadline_s,
        "scoring.deadline_s": config.scoring.deadline_s,
        "weights.load_deadline_s": config.weights.load_deadline_s,
        "runtime.start_deadline_s": config.runtime.start_deadline_s,
        "runtime.stop_deadline_s": config.runtime.stop_deadline_s,
        "blobs.call_deadline_s": config.blobs.call_deadline_s,
        "blobs.max_upload_s": config.blobs.max_upload_s,
    }
    for name, given in (
        ("inference.probe_tolerance", config.inference.probe_tolerance),
        ("inference.mismatch_bound", config.inference.mismatch_bound),
    ):
        if given is not None:
            positive[name] = given
    if config.rollout.budget_s is not None:
        positive["rollout.budget_s"] = config.rollout.budget_s
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            yield f"{name} must be a finite number > 0, got {value}"
    if config.rollout.budget_tokens is not None and config.rollout.budget_tokens < 1:
        yield f"rollout.budget_tokens must be >= 1 or null, got {config.rollout.budget_tokens}"
    if not 0 < config.rollout.top_p <= 1:
        yield f"rollout.top_p must be > 0 and <= 1, got {config.rollout.top_p}"
    if not 0 < config.admission.max_drop_frac <= 1:
        yield f"admission.max_drop_frac must be > 0 and <= 1, got {config.admission.max_drop_frac}"
    if config.rollout.temperature == 0:
        yield "rollout.temperature must be > 0 for training, got 0: greedy siblings are all alike"
    if not 0 <= config.train.final_rate_frac <= 1:
        yield f"train.final_rate_frac must be >= 0 and <= 1, got {config.train.final_rate_frac}"
    if config.gateway.port > 65_535:
        yield f"gateway.port must be <= 65535, got {config.gateway.port}"
    if (config.coordinator.port or 0) > 65_535:
        yield f"coordinator.port must be <= 65535, got {config.coordinator.port}"
    if not 0 <= config.algorithm.clip_low < 1:
        yield f"algorithm.clip_low must be >= 0 and < 1, got {config.algorithm.clip_low}"


def _batch_arithmetic(config: Config) -> Iterator[str]:
    batch, group = config.train.batch_size, config.rollout.group_size
    ranks = config.resources.train_gpus * config.train.grad_accum_steps
    unit = math.lcm(group, ranks)
    fits = f"{max(unit, batch // unit * unit)} or {(batch // unit + 1) * unit} would fit"
    if batch % group:
        yield f"train.batch_size must be divisible by rollout.group_size ({group}), got {batch}; {fits}"
    if batch % ranks:
        accumulated = f"{config.resources.train_gpus} x {config.train.grad_accum_steps} = {ranks}"
        yield (
            "train.batch_size must be divisible by resources.train_gpus x train.grad_accum_steps "
            f"({accumulated}), got {batch}; {fits}"
        )
    if config.algorithm.min_scored > group:
        yield f"algorithm.min_scored must be <= rollout.group_size ({group}), got {config.algorithm.min_scored}"


def _room(config: Config) -> Iterator[str]:
    context = config.model.max_context_tokens
    if config.rollout.max_tokens >= context:
        yield f"rollout.max_tokens must be < model.max_context_tokens ({context}), got {config.rollout.max_tokens}"
    if config.inference.kv_tokens < context:
        yield f"inference.kv_tokens must be >= model.max_context_tokens ({context}), got {config.inference.kv_tokens}"
    if config.train.micro_batch_tokens < context:
        got = config.train.micro_batch_tokens
        yield f"train.micro_batch_tokens must be >= model.max_context_tokens ({context}), got {got}"
    versions = config.admission.max_policy_lag + 2
    if config.weights.max_retained_versions < versions:
        yield (
            f"weights.max_retained_versions must be >= admission.max_policy_lag + 2 ({versions}), "
            f"got {config.weights.max_retained_versions}"
        )


_LOSSES_FOR_KEPT_KV: frozenset[str] = frozenset()
"""``algorithm.kind`` whose loss declares that it accepts tokens over KV of an older version. None does so far."""


def _weights(config: Config) -> Iterator[str]:
    weights, kind = config.weights, config.algorithm.kind
    if weights.kv == "keep" and weights.mode == "pinned":
        yield "weights.kv must be recompute where weights.mode is pinned: no KV outlives its version, got keep"
    elif weights.kv == "keep" and kind not in _LOSSES_FOR_KEPT_KV:
        accepting = ", ".join(sorted(_LOSSES_FOR_KEPT_KV)) or "none does in this version"
        yield (
            f"weights.kv must be recompute where the loss of algorithm.kind {kind} does not declare that it accepts "
            f"tokens over an older version's KV ({accepting}), got keep"
        )
    if weights.publication == "blue_green" and config.resources.rollout_gpus < 2:
        got = config.resources.rollout_gpus
        yield f"resources.rollout_gpus must be >= 2 where weights.publication is blue_green, got {got}"


def _workers(config: Config) -> Iterator[str]:
    for name, number in (
        ("rollout.num_workers", config.rollout.num_workers),
        ("scoring.num_workers", config.scoring.num_workers),
    ):
        if number == 0 and config.coordinator.port is None:
            yield f"coordinator.port must be set where {name} is 0: somebody elsewhere must do the work, got null"


def _harness(harness: HarnessConfig) -> Iterator[str]:
    if harness.deadline_s <= 0:
        yield f"harness.deadline_s must be > 0, got {harness.deadline_s}"
    if harness.kind == "chat_loop":
        if harness.command:
            yield "harness.command is only for harness.kind command, got chat_loop"
        return
    if not harness.command or not harness.command[0]:
        yield "harness.command must name a program for harness.kind command, got nothing"
    if harness.isolation != "none":
        yield (
            "harness.isolation must be none for harness.kind command: the program runs as you, with your files and"
            " your network, and does what the policy says; choose it by name, or start a container as the program"
        )


def _blobs(blobs: BlobsConfig) -> Iterator[str]:
    """Passwords are looked for first, so that no message repeats one."""
    for name, url in (("blobs.url", blobs.url), ("blobs.endpoint_url", blobs.endpoint_url)):
        if url is not None and "@" in url:
            yield f"{name} must hold no credentials, got a URL with @: the S3 library has its own places for them"
    if blobs.url is not None and not _BLOBS_URL.fullmatch(blobs.url):
        yield f"blobs.url must be null, s3://bucket/prefix or file:///folder, got {blobs.url}"
    is_s3 = blobs.url is not None and blobs.url.startswith("s3:")
    for name, value in (("blobs.endpoint_url", blobs.endpoint_url), ("blobs.region", blobs.region)):
        if value is not None and not is_s3:
            yield f"{name} must be null unless blobs.url is s3://..., got {value}"
    if blobs.endpoint_url is not None and not re.fullmatch(r"https?://[^/\s?#]+/?", blobs.endpoint_url):
        yield f"blobs.endpoint_url must look like https://host:port, got {blobs.endpoint_url}"
    if blobs.max_upload_s < blobs.call_deadline_s:
        yield f"blobs.max_upload_s must be >= blobs.call_deadline_s ({blobs.call_deadline_s}), got {blobs.max_upload_s}"


def _journal(journal: JournalConfig) -> Iterator[str]:
    given = {"journal.url": journal.url, "journal.name": journal.name}
    if journal.kind != "postgres":
        for name, value in given.items():
            if value is not None:
                yield f"{name} must be unset unless journal.kind is postgres, got journal.kind {journal.kind}"
        return
    for name, value in given.items():
        if not value:
            yield f"{name} must be given with journal.kind postgres, got none"
    if journal.name is not None and not (len(journal.name) <= _MAX_NAME_CHARS and journal.name.isprintable()):
        yield f"journal.name must be at most {_MAX_NAME_CHARS} printable characters, got {journal.name[:80]!r}"
    if not math.isfinite(journal.lease_s):
        yield f"journal.lease_s must be a finite number >= 1, got {journal.lease_s}"
    yield from _journal_url(journal.url or "")


def _journal_url(url: str) -> Iterator[str]:
    """The value is never shown: a fault in it could be a password in the wrong place."""
    try:
        parts = urlsplit(url)
        secrets = {"password", "sslpassword"} & {key for key, _ in parse_qsl(parts.query, keep_blank_values=True)}
        # A password with a "/" or "?" in it ends the part that urlsplit looks at.
        before, at, _ = url.partition("://")[2].partition("@")
        is_secret = bool(secrets) or parts.password is not None or (bool(at) and ":" in before)
    except ValueError:
        yield "journal.url must be a URL, such as postgresql://me@host/runs, got one that cannot be read"
        return
    if is_secret:
        yield (
            "journal.url must not hold a password, for it is kept in config.yaml and shown in reports; "
            "put it into libpq's password file: ~/.pgpass, or passfile=PATH in the URL"
        )
    elif parts.scheme not in ("postgresql", "postgres"):
        yield "journal.url must begin with postgresql://, got another beginning"


def _vllm(config: Config) -> Iterator[str]:
    """What a vLLM server cannot do is known before one is started."""
    vllm = config.inference.vllm
    if not (vllm.start_deadline_s > 0 and math.isfinite(vllm.start_deadline_s)):
        yield f"inference.vllm.start_deadline_s must be a finite number > 0, got {vllm.start_deadline_s}"
    if vllm.kv_cache_bytes < _MIN_KV_CACHE_BYTES:
        yield f"inference.vllm.kv_cache_bytes must be >= {_MIN_KV_CACHE_BYTES}, got {vllm.kv_cache_bytes}"
    if vllm.url is not None and "@" in vllm.url:
        yield "inference.vllm.url must hold no credentials, got a URL with @"
    if vllm.url is not None and not re.fullmatch(r"https?://[^/\s?#@]+/?", vllm.url):
        yield f"inference.vllm.url must be null or look like http://127.0.0.1:8000, got {vllm.url}"
    for argument in vllm.extra_args:
        if argument.split("=")[0] in _VLLM_ARGUMENTS:
            yield f"inference.vllm.extra_args must not hold {argument}: Steelyard sets it, or cannot work with it"
    if config.inference.engine != "vllm":
        return
    if config.rollout.top_p != 1:
        yield (
            f"rollout.top_p must be 1 with inference.engine vllm, got {config.rollout.top_p}: vLLM cannot return both "
            "the log-probability over the full vocabulary and the kept mass"
        )
    if config.rollout.temperature < _MIN_VLLM_TEMPERATURE:
        got = config.rollout.temperature
        yield f"rollout.temperature must be >= {_MIN_VLLM_TEMPERATURE} with inference.engine vllm, got {got}"
    if vllm.url is not None and config.resources.rollout_gpus != 1:
        got = config.resources.rollout_gpus
        yield f"resources.rollout_gpus must be 1 where inference.vllm.url gives the one server, got {got}"


def _router(router: RouterConfig) -> Iterator[str]:
    if router.queue_deadline_s is not None and not (
        router.queue_deadline_s >= 0 and math.isfinite(router.queue_deadline_s)
    ):
        yield f"inference.router.queue_deadline_s must be null or a finite number >= 0, got {router.queue_deadline_s}"
    if router.hedge_quantile is not None and not 0.5 <= router.hedge_quantile < 1:
        yield f"inference.router.hedge_quantile must be null, or >= 0.5 and < 1, got {router.hedge_quantile}"


def _emulated(emulated: EmulatedConfig) -> Iterator[str]:
    for name in ("time_scale", "median_output_tokens", "output_sigma"):
        value = getattr(emulated, name)
        minimum_allowed = name == "output_sigma"
        if not (math.isfinite(value) and (value > 0 or (minimum_allowed and value == 0))):
            bound = ">= 0" if minimum_allowed else "> 0"
            yield f"inference.emulated.{name} must be a finite number {bound}, got {value}"


def _scheduler(scheduler: SchedulerConfig, resources: ResourcesConfig) -> Iterator[str]:
    for field in ("adjust_interval_steps", "min_rollout_gpus", "min_train_gpus"):
        if getattr(scheduler, field) < 1:
            yield f"scheduler.{field} must be >= 1, got {getattr(scheduler, field)}"
    if not 0.0 <= scheduler.queue_weight <= 1.0:
        yield f"scheduler.queue_weight must be between 0 and 1, got {scheduler.queue_weight}"
    most = scheduler.max_rollout_gpus
    if most is not None and most < scheduler.min_rollout_gpus:
        yield f"scheduler.max_rollout_gpus must be >= min_rollout_gpus ({scheduler.min_rollout_gpus}), got {most}"
    if not scheduler.enabled:
        return
    for role, least in (("rollout", scheduler.min_rollout_gpus), ("train", scheduler.min_train_gpus)):
        count = getattr(resources, f"{role}_gpus")
        if count < least:
            yield f"resources.{role}_gpus must be >= scheduler.min_{role}_gpus ({least}), got {count}"
    if most is not None and resources.rollout_gpus > most:
        yield f"resources.rollout_gpus must be <= scheduler.max_rollout_gpus ({most}), got {resources.rollout_gpus}"


def _not_available(config: Config) -> Iterator[str]:
    if config.runtime.kind != "local":
        yield f"runtime.kind must be local in this version, got {config.runtime.kind}"
    if config.resources.train_gpus != 1:
        yield f"resources.train_gpus must be 1 in this version, got {config.resources.train_gpus}"
    if config.resources.reward_gpus != 0:
        yield f"resources.reward_gpus must be 0 in this version, got {config.resources.reward_gpus}"
    if config.resources.total_gpus is not None:
        yield f"resources.total_gpus must be unset in this version, got {config.resources.total_gpus}"
    if config.model.reward is not None:
        yield f"model.reward must be unset in this version, got {config.model.reward}"
    if config.rollout.num_workers > 1:
        yield f"rollout.num_workers must be 0 or 1 in this version, got {config.rollout.num_workers}"
    if config.scheduler.enabled:
        yield "scheduler.enabled must be false in this version, got true"
    if config.allocation.policy not in (None, "fixed"):
        yield f"allocation.policy must be fixed in this version, got {config.allocation.policy}"
