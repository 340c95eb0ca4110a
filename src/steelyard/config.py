"""The configuration: one frozen tree, read from YAML and dotted overrides, checked before anything starts.

Every key is listed here with its default; an unknown key is an error that names the nearest valid one.
Stage packages take the section they need. Nothing reads the environment for settings.
"""

from typing import Any, Literal

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configuration sections."""


class RunConfig(Section, frozen=True, kw_only=True):
    """``dir`` defaults to a new ``runs/<name>-<NNN>``."""

    name: str = "run"
    dir: str | None = None
    seed: int = 0


class RuntimeConfig(Section, frozen=True, kw_only=True):
    """``inline`` holds everything in one process (tests); ``local`` runs one process per component.

    A replica or trainer that dies is started again, at most ``max_restarts`` times in a row without any success.
    """

    kind: Literal["inline", "local", "ray"] = "local"
    devices: Literal["cpu"] = "cpu"
    ray_address: str | None = None
    start_deadline_s: float = 120.0
    stop_deadline_s: float = 10.0
    max_restarts: int = 3


class ModelConfig(Section, frozen=True, kw_only=True):
    """``policy`` is a Hugging Face directory, or ``builtin:quick`` for the quick policy."""

    policy: str = "builtin:quick"
    reward: str | None = None
    max_context_tokens: int = 1024


class ResourcesConfig(Section, frozen=True, kw_only=True):
    """Counts of devices of whatever kind; on a CPU a device is one pinned core with one torch thread."""

    rollout_gpus: int = 1
    train_gpus: int = 1
    reward_gpus: int = 0
    total_gpus: int | None = None


class EnvironmentConfig(Section, frozen=True, kw_only=True):
    """``options`` belong to the environment, which checks them itself."""

    kind: str = "repair"
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class RolloutConfig(Section, frozen=True, kw_only=True):
    """Limits on the policy are tokens and turns, never wall time.

    A rollout is given up as cancelled, never scored, when one of its budgets is used up: ``max_attempts`` failed
    attempts, ``budget_tokens`` sampled over all its attempts (lost ones included; looked at between attempts), or
    ``budget_s`` seconds from its admission to its end, waiting included, which is the system's time and not the
    policy's. None: no limit.

    ``num_workers`` 0: the run has no harness of its own, only workers elsewhere run attempts (``steelyard worker``).
    """

    num_workers: int = 1
    group_size: int = 8
    max_turns: int = 6
    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    max_concurrent: int = 64
    lease_s: float = 60.0
    max_attempts: int = 3
    budget_tokens: int | None = None
    budget_s: float | None = None
    turn_deadline_s: float = 60.0


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """Group-relative policy optimisation (GRPO, arXiv 2402.03300) with a clipped ratio.

    ``permute_rewards`` is the negative control: within each group rewards change hands, so nothing can be learnt from
    them; what still improves was not learnt from rewards.
    """

    kind: Literal["grpo"] = "grpo"
    min_scored: int = 2
    normalise_by_std: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    permute_rewards: bool = False


class AdmissionConfig(Section, frozen=True, kw_only=True):
    """How far behind the trainer a trajectory may be; see DESIGN section 4.

    One level of priority is worth ``priority_ageing_s`` seconds of waiting.
    """

    max_policy_lag: int = 1
    max_age_s: float | None = None
    max_tail_wait_s: float = 120.0
    max_stale_retries: int = 2
    max_drop_frac: float = 0.5
    priority_ageing_s: float = 60.0


class TrainConfig(Section, frozen=True, kw_only=True):
    """``batch_size`` is trajectories per optimizer step over all devices.

    The learning rate falls in a line to ``final_rate_frac`` of itself at ``max_steps``.
    """

    batch_size: int = 192
    grad_accum_steps: int = 1
    max_steps: int = 60
    learning_rate: float = 3e-4
    final_rate_frac: float = 1.0
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    micro_batch_tokens: int = 8192
    step_deadline_s: float = 600.0


class VllmConfig(Section, frozen=True, kw_only=True):
    """A vLLM server as the engine; see docs/vllm.md.

    ``python``: of an environment with vLLM (``make venv-vllm`` makes one); a server is started with it for every
    rollout device. Or ``url``: of one that is started already, as docs/vllm.md says, and sees the run directory under
    the same path. ``kv_cache_bytes`` is for key-value cache; ``extra_args`` go to the server as they are.
    """

    python: str = ".venv-vllm/bin/python"
    url: str | None = None
    start_deadline_s: float = 300.0
    kv_cache_bytes: int = 1 << 30
    extra_args: tuple[str, ...] = ()


class EmulatedConfig(Section, frozen=True, kw_only=True):
    """A device and a model that are not there, for ``inference.engine: emulated``; see docs/emulated.md.

    A step takes what the cost model says for the model on the device; all devices are one process. ``time_scale``:
    emulated seconds per second of the clock. ``device`` is a kind of device, ``model`` a known model or a folder with a
    ``config.json``, ``calibration`` a file of ``steelyard calibrate`` for such a device. Answers are log-normal in
    length.
    """

    time_scale: float = 1.0
    device: str = "H100"
    model: str = "qwen2.5-7b"
    calibration: str | None = None
    median_output_tokens: float = 100.0
    output_sigma: float = 0.8


class RouterConfig(Section, frozen=True, kw_only=True):
    """What stands between the gateway and the replicas.

    ``queue_deadline_s``: how long a request may wait for a replica with room; null, as long as its turn may take.
    ``hedge_quantile``: a request that waits longer for its first token than this share of the last ones is given to a
    second replica as well; null, never.
    """

    queue_deadline_s: float | None = None
    hedge_quantile: float | None = None


class InferenceConfig(Section, frozen=True, kw_only=True):
    """One engine per rollout device.

    ``probe_tolerance``: by how much a load may differ in the log-probabilities of its probe, in nats. Null takes what
    was measured for the engine and ``weights.dtype``. ``mismatch_bound``: an alarm goes on where the log-probabilities
    that engine and trainer give to tokens of the newest weights differ by more than this at the 99th percentile of a
    step, in nats; null likewise.
    """

    engine: Literal["local", "vllm", "emulated"] = "local"
    max_running: int = 64
    kv_tokens: int = 131_072
    prefill_chunk_tokens: int = 512
    probe_tolerance: float | None = None
    mismatch_bound: float | None = None
    router: RouterConfig = RouterConfig()
    vllm: VllmConfig = VllmConfig()
    emulated: EmulatedConfig = EmulatedConfig()


class HarnessConfig(Section, frozen=True, kw_only=True):
    """Who talks to the policy; see docs/agents.md.

    ``chat_loop``: our own loop over the environment's tools. ``command``: a program of yours, started once for each
    attempt, which is given the policy's address and a key. It runs as an ordinary process, so ``isolation: none`` must
    be chosen by name; within ``deadline_s`` it must end. ``memory_bytes`` bounds each of its processes.
    """

    kind: Literal["chat_loop", "command"] = "chat_loop"
    command: tuple[str, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    isolation: Literal["none"] | None = None
    deadline_s: float = 300.0
    memory_bytes: int = 4 << 30
    max_output_bytes: int = 1 << 20
    max_file_bytes: int = 64 << 20
    max_open_files: int = 256


class GatewayConfig(Section, frozen=True, kw_only=True):
    """``port`` 0 takes a free one. Only loopback unless said otherwise.

    ``models``: the names by which requests may call the policy; null: any, so that an agent needs no change.
    ``tool_parser``: the form in which the policy writes tool calls; ``auto`` is the one that fits its chat template.
    """

    host: str = "127.0.0.1"
    port: int = 0
    models: tuple[str, ...] | None = None
    tool_parser: Literal["auto", "hermes", "mistral", "deepseek", "llama3"] = "auto"


class SandboxConfig(Section, frozen=True, kw_only=True):
    """``process`` isolates nothing and must be chosen by name.

    ``memory_bytes`` bounds each process of a sandbox, ``max_file_bytes`` each file, ``max_disk_bytes`` all files.
    ``num_warm`` sandboxes are started ahead; at most ``max_alive`` exist at a time.
    """

    kind: Literal["bubblewrap", "process"] = "bubblewrap"
    call_deadline_s: float = 2.0
    memory_bytes: int = 256 << 20
    max_processes: int = 16
    max_output_bytes: int = 65_536
    max_file_bytes: int = 4 << 20
    max_open_files: int = 64
    max_disk_bytes: int = 16 << 20
    num_warm: int = 4
    max_alive: int = 128
    start_deadline_s: float = 20.0


class ScoringConfig(Section, frozen=True, kw_only=True):
    """Graders run in their own processes, which can be killed; each grades ``concurrency`` artifacts at a time.

    ``num_workers`` 0: the run has no graders of its own, only scorers elsewhere grade (``steelyard scorer``).
    """

    num_workers: int = 1
    concurrency: int = 4
    deadline_s: float = 20.0
    max_attempts: int = 3
    alarm_failure_frac: float = 0.1


class WeightsConfig(Section, frozen=True, kw_only=True):
    """Publication of policy versions.

    ``mode`` ``pinned``: one version samples a trajectory from its first token to its last. ``segmented``: weights may
    change between two tokens, and spans say where; ``kv`` says what becomes of the KV then.

    ``publication`` says how several replicas go over to a version. ``rolling``: one after the other, the others serve
    on. ``blue_green``: one replica stands by, loads, and takes the place of another. ``drain``: all stop taking
    attempts, load, and go on.

    ``dtype`` is what is published and what engines compute in; the trainer keeps float32. ``max_shard_bytes`` bounds
    the files of a version, in bytes of tensor data; a larger tensor is a file by itself.
    """

    mode: Literal["pinned", "segmented"] = "pinned"
    kv: Literal["recompute", "keep"] = "recompute"
    publication: Literal["rolling", "blue_green", "drain"] = "rolling"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_shard_bytes: int = 4 << 30
    max_retained_versions: int = 8
    load_deadline_s: float = 60.0


class JournalConfig(Section, frozen=True, kw_only=True):
    """Where events go. ``group_commit_s`` is how long a commit may wait for company.

    A snapshot of the state is written every ``snapshot_every_events`` committed events, and when a run ends; a resume
    replays only what came after the newest one.

    For ``postgres``, ``url`` is a connection URL of libpq without a password, which belongs into libpq's password file;
    ``name`` tells the journals of one database apart; ``lease_s`` is how long after the writer's last renewal another
    process may take its place. See docs/journal.md.
    """

    kind: Literal["memory", "sqlite", "postgres"] = "sqlite"
    url: str | None = None
    name: str | None = None
    lease_s: float = 10.0
    group_commit_s: float = 0.002
    snapshot_every_events: int = 50_000


class CoordinatorConfig(Section, frozen=True, kw_only=True):
    """Where workers, scorers and trainers on other machines reach the coordinator; see docs/protocol.md.

    ``port`` null: a run of ``train`` serves nobody else, and ``steelyard coordinator`` takes a free port, as for 0.
    Only loopback unless said otherwise.
    """

    host: str = "127.0.0.1"
    port: int | None = None


class BlobsConfig(Section, frozen=True, kw_only=True):
    """Where sealed traces, artifacts and logs are kept; see docs/blobs.md.

    ``url`` None is the run directory. ``s3://bucket/prefix`` and ``file:///folder`` are places for many runs: each gets
    a folder of its own in it. ``endpoint_url`` is that of a server that speaks S3, None is Amazon's. Credentials are
    never given here: they come from where the S3 library looks for them (environment, ``~/.aws``).
    One call may take ``call_deadline_s``, an upload with all its tries ``max_upload_s``.
    """

    url: str | None = None
    endpoint_url: str | None = None
    region: str | None = None
    call_deadline_s: float = 10.0
    max_upload_s: float = 60.0
    max_tries: int = 5


class AllocationConfig(Section, frozen=True, kw_only=True):
    """Who decides on devices. Without ``policy``: ``queue`` if ``scheduler.enabled``, else ``fixed``.

    ``options`` belong to the policy, which checks them itself. A live run knows only ``fixed`` yet; a simulation all
    of them, those of other packages included (docs/simulator.md).
    ``calibration``: a file of ``steelyard calibrate``, beside which a live run sets what its parts take.
    """

    policy: str | None = None
    calibration: str | None = None
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Movement of devices between roles by the policy ``queue``. ``max_rollout_gpus`` None: no limit."""

    enabled: bool = False
    adjust_interval_steps: int = 5
    queue_weight: float = 0.6
    min_rollout_gpus: int = 1
    min_train_gpus: int = 1
    max_rollout_gpus: int | None = None


class EvalConfig(Section, frozen=True, kw_only=True):
    """``num_tasks`` held-out tasks (the same for every seed), sampled and greedy, before and after."""

    num_tasks: int = 0
    num_unseen_templates: int = 0
    greedy: bool = True
    sampled: bool = True
    before: bool = True
    after: bool = True


class ObserveConfig(Section, frozen=True, kw_only=True):
    """What people see while a run goes on."""

    display: Literal["auto", "live", "plain", "quiet"] = "auto"
    report: bool = True


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration of a run."""

    run: RunConfig = RunConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    model: ModelConfig = ModelConfig()
    resources: ResourcesConfig = ResourcesConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    harness: HarnessConfig = HarnessConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    admission: AdmissionConfig = AdmissionConfig()
    train: TrainConfig = TrainConfig()
    inference: InferenceConfig = InferenceConfig()
    gateway: GatewayConfig = GatewayConfig()
    sandbox: SandboxConfig = SandboxConfig()
    scoring: ScoringConfig = ScoringConfig()
    weights: WeightsConfig = WeightsConfig()
    journal: JournalConfig = JournalConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    blobs: BlobsConfig = BlobsConfig()
    allocation: AllocationConfig = AllocationConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def groups_per_batch(self) -> int:
        """Groups that one optimizer step consumes."""
        return self.train.batch_size // self.rollout.group_size
