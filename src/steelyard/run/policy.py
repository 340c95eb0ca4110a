"""The starting policy: a directory of the user's, or the quick policy, built once and cached."""

from collections.abc import Callable
from pathlib import Path

import msgspec

import steelyard.environments
import steelyard.gateway
from steelyard.config import Config
from steelyard.environments.repair.demonstrations import Mixture
from steelyard.errors import ConfigError
from steelyard.processes.channel import StreamingEndpoint
from steelyard.run.children import ChildOptions, start_child
from steelyard.trainer.policy_cache import PolicyCache
from steelyard.trainer.quick_recipe import QuickPolicyRecipe, WarmUpProgress, WarmUpReport, cache_key, source_digest
from steelyard.types import Record

QUICK = "builtin:quick"
EXERCISE_FRAC = 0.6
_BUILD_DEADLINE_S = 600.0
_ENOUGH_FRAC = 0.8
"""A recipe has as many steps as a fast machine takes in its time; with 700 of 850 the quickstart keeps its promise."""
_NEEDED_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
OnProgress = Callable[[WarmUpProgress], None]
OnNote = Callable[[str], None]


class BuildRequest(Record, frozen=True, kw_only=True):
    """Build the quick policy into the empty directory ``directory``.

    ``exercise_frac`` of the warm-up's tokens are exercises (a function and the edit that mends it), the rest are whole
    demonstrations, which are imperfect on purpose.
    """

    directory: str
    recipe: QuickPolicyRecipe
    mixture: Mixture
    exercise_frac: float
    max_turns: int


BUILD = StreamingEndpoint("policy.build", BuildRequest, WarmUpReport, WarmUpProgress)


def check_policy(config: Config) -> None:
    """Check what can be checked of the starting policy before a start.

    Raises:
        ConfigError: the directory is missing or lacks a file, tokenizer and model do not fit, or the environment has
            no demonstrations for the quick policy.
    """
    policy = config.model.policy
    if policy == QUICK:
        if config.environment.kind != "repair":
            raise ConfigError(
                f"model.policy: {QUICK} is made for environment.kind repair, got {config.environment.kind}"
            )
        return
    if policy.startswith("builtin:"):
        raise ConfigError(f"model.policy must be {QUICK} or a directory, got {policy}")
    directory = Path(policy)
    if not directory.is_dir():
        raise ConfigError(f"model.policy must be a Hugging Face model directory, got {policy} which does not exist")
    missing = [name for name in _NEEDED_FILES if not (directory / name).is_file()]
    if missing:
        raise ConfigError(f"model.policy must hold {', '.join(_NEEDED_FILES)}, but {policy} lacks {', '.join(missing)}")
    if not any(any(directory.glob(pattern)) for pattern in _WEIGHTS):
        raise ConfigError(f"model.policy must hold weights (*.safetensors), but {policy} holds none")
    _check_fit(directory, config)


def _check_fit(directory: Path, config: Config) -> None:
    """The tokenizer's ids must all be rows of the model's embedding, and the context must fit."""
    try:
        model = msgspec.json.decode((directory / "config.json").read_bytes(), type=_ModelShape)
        tokenizer = msgspec.json.decode((directory / "tokenizer.json").read_bytes(), type=_TokenizerShape)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"model.policy must hold a decoder and its tokenizer, but {directory}: {error}") from None
    ids = [*tokenizer.model.ids(), *(token.id for token in tokenizer.added_tokens)]
    largest = max(ids, default=-1)
    if largest >= model.vocab_size:
        raise ConfigError(
            f"model.policy: tokenizer and model must fit, but {directory} has token id {largest} in tokenizer.json "
            f"and vocab_size {model.vocab_size} in config.json"
        )
    limit = model.max_position_embeddings
    if limit is not None and config.model.max_context_tokens > limit:
        raise ConfigError(
            f"model.max_context_tokens must be <= the model's max_position_embeddings ({limit}), "
            f"got {config.model.max_context_tokens}"
        )


class _ModelShape(msgspec.Struct):
    vocab_size: int
    max_position_embeddings: int | None = None


class _AddedToken(msgspec.Struct):
    id: int


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = msgspec.field(default_factory=dict)

    def ids(self) -> list[int]:
        return list(self.vocab.values()) if isinstance(self.vocab, dict) else list(range(len(self.vocab)))


class _TokenizerShape(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


async def prepare_policy(
    config: Config, cache_dir: Path, folder: Path, parent_pid: int, on_progress: OnProgress, on_note: OnNote
) -> Path:
    """The directory of the starting policy; builds the quick policy where it is not cached yet.

    Args:
        cache_dir: where built policies are kept.
        folder: for the socket and the log of the building process.
        on_note: gets what the user should know of a finished building.

    Raises:
        ProcessDied: the building process ended.
        DeadlineExceeded: it took too long.
    """
    if config.model.policy != QUICK:
        return Path(config.model.policy).absolute()
    recipe, mixture = QuickPolicyRecipe(), Mixture()
    policies, key = cache_dir / "policies", quick_policy_key(recipe, mixture, config.rollout.max_turns)

    async def build(directory: Path) -> None:
        options = ChildOptions(name="policy", socket_path=str(folder / "policy.sock"), parent_pid=parent_pid)
        child = await start_child(
            "steelyard.run.policy_process", options, log_folder=folder, num_threads=recipe.num_threads
        )
        try:
            client = await child.connect(Path(options.socket_path), config.runtime.start_deadline_s)
            request = BuildRequest(
                directory=str(directory),
                recipe=recipe,
                mixture=mixture,
                exercise_frac=EXERCISE_FRAC,
                max_turns=config.rollout.max_turns,
            )
            report = await client.call_streaming(BUILD, request, on_progress, deadline_s=_BUILD_DEADLINE_S)
            await client.close()
            if (note := early_note(report, recipe.num_steps, policies / key)) is not None:
                on_note(note)
        finally:
            await child.stop(config.runtime.stop_deadline_s)

    return await PolicyCache(policies).get_or_build(key, build, _BUILD_DEADLINE_S)


def early_note(report: WarmUpReport, num_steps: int, entry: Path) -> str | None:
    """What to tell the user of a warm-up whose time ran out long before its ``num_steps``; None where it did not."""
    if report.num_steps >= _ENOUGH_FRAC * num_steps:
        return None
    return (
        f"the warm-up ran out of time after {report.num_steps} of {num_steps} steps: this machine is slow or busy, and "
        f"the starting policy is weaker for it; to build it again, delete {entry}"
    )


def quick_policy_key(recipe: QuickPolicyRecipe, mixture: Mixture, max_turns: int) -> str:
    """The cache key: a digest of everything that makes the policy, code included."""
    environments = Path(steelyard.environments.__path__[0])
    gateway = Path(steelyard.gateway.__path__[0])
    run = Path(__file__).parent
    parts = {
        "demonstrations": source_digest([environments / "repair"]),
        "rendering": source_digest(
            [gateway / "templates", gateway / "renderer.py", gateway / "codec.py", run / "demonstration_tokens.py"]
        ),
        "building": source_digest([run / "policy_process.py"]),
        "mixture": msgspec.json.encode(mixture).decode(),
        "exercise_frac": str(EXERCISE_FRAC),
        "max_turns": str(max_turns),
    }
    return cache_key(recipe, parts)
