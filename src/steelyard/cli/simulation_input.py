"""What ``steelyard simulate`` reads: a scenario or a configuration, the model that it names, the work that it names."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from steelyard import config_file
from steelyard.allocation.architecture import Architecture, read_architecture
from steelyard.allocation.calibration import Calibration, decode_calibration
from steelyard.allocation.trace_lines import read_traces
from steelyard.allocation.workload import Workload
from steelyard.config import Config
from steelyard.errors import InputError
from steelyard.run.policy import QUICK
from steelyard.sim.from_config import DEFAULT_MODEL, Assumed, Choices, scenario_of
from steelyard.sim.scenario import KNOWN_MODELS, Scenario, TracesPart, known_model, make_setup, read_scenario
from steelyard.sim.setup import SimSetup
from steelyard.trainer.quick_recipe import QuickPolicyRecipe
from steelyard.types.record import Record


class Wanted(Record, frozen=True, kw_only=True):
    """What the command line says beside the file; None: what the file says.

    ``policy`` is whose limits on moves a configuration is read with; ``defaults`` are keys that a scenario may leave
    out.
    """

    overrides: tuple[str, ...] = ()
    steps: int | None = None
    device: str | None = None
    traces: str | None = None
    tool_s: float | None = None
    policy: str | None = None
    defaults: Mapping[str, Any] = msgspec.field(default_factory=dict)


def read_file(path: Path, wanted: Wanted) -> Assumed:
    """The scenario in a file, or of the configuration in it.

    Raises:
        InputError: the file is neither; names the key.
    """
    tree = config_file.read_yaml(path, "scenario")
    for override in wanted.overrides:
        config_file.apply_override(tree, override)
    if _is_config(tree):
        if wanted.steps is not None:
            config_file.apply_override(tree, f"train.max_steps={wanted.steps}")
        if wanted.policy is not None:
            config_file.apply_override(tree, f"allocation.policy={wanted.policy}")
        config = config_file.from_tree(tree, is_live=False)
        # The default name of a run says nothing about it; its file's does.
        name = config.run.name if "name" in (tree.get("run") or {}) else path.stem
        return scenario_from_config(config, name, wanted)
    scenario = read_scenario({**wanted.defaults, **tree}, str(path))
    if wanted.steps is not None:
        scenario = msgspec.structs.replace(scenario, steps=wanted.steps)
    if wanted.device is not None:
        devices = msgspec.structs.replace(scenario.devices, kind=wanted.device)
        scenario = msgspec.structs.replace(scenario, devices=devices)
    if wanted.traces is not None:
        size = scenario.synthetic.group_size if scenario.synthetic is not None else _traces(scenario).group_size
        scenario = msgspec.structs.replace(scenario, synthetic=None, traces=_given_traces(wanted, size))
    return Assumed(scenario=scenario, notes=())


def scenario_from_config(config: Config, name: str, wanted: Wanted) -> Assumed:
    """The scenario ``name`` of a checked configuration; models that are not there are replaced, and that is told.

    Raises:
        InputError: names what cannot be.
    """
    notes = list[str]()
    model = _present_model(config.model.policy, "model.policy", notes)
    reward = config.model.reward
    return scenario_of(
        config,
        Choices(
            name=name,
            model=model,
            architecture=read_model(model, Path()),
            reward_model=None if reward is None else _present_model(reward, "model.reward", notes),
            device=wanted.device,
            traces=_given_traces(wanted, config.rollout.group_size),
            notes=tuple(notes),
        ),
    )


def setup_of(scenario: Scenario, beside: Path, calibration: str | None = None) -> SimSetup:
    """What is simulated; files that the scenario names lie in ``beside``.

    Args:
        calibration: the file of one that takes the place of the scenario's.

    Raises:
        InputError: names what cannot be, and what would fit.
    """
    return make_setup(
        scenario,
        lambda part: read_workload(part, beside),
        lambda name: read_model(name, beside),
        read_calibration(scenario, calibration, beside),
    )


def read_calibration(scenario: Scenario, named: str | None, beside: Path) -> Calibration | None:
    """The calibration that the command line names, or else the scenario, whose file lies in ``beside``.

    Raises:
        InputError: the file cannot be read, or is no calibration.
    """
    if named is None and scenario.calibration is None:
        return None
    path = Path(named) if named is not None else beside / str(scenario.calibration)
    try:
        return decode_calibration(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"the calibration {path} must be readable, got: {error.strerror}") from None


def read_model(name: str, beside: Path) -> Architecture:
    """The architecture of a built-in model, or of a Hugging Face directory or ``config.json``.

    Raises:
        InputError: there is none of that name; or the file is not readable, no JSON, or of a kind that is not modelled.
    """
    if name == QUICK:
        return _quick_architecture()
    path = beside / name
    if name in KNOWN_MODELS or not path.exists():
        return known_model(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model {path} must be readable, got: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"model {path} must be JSON, got: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"model {path} must be a JSON object, got {type(config).__name__}")
    return read_architecture(config, name)


def read_workload(part: TracesPart, beside: Path) -> Workload:
    """The traces of a scenario whose file lies in ``beside``.

    Raises:
        InputError: the file cannot be read, or is no trace.
    """
    path = beside / part.path
    try:
        return read_traces(_trace_lines(path), path.name, default_tool_s=part.tool_s)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"traces.path must be readable, {path} is not: {reason}") from None


def _trace_lines(path: Path) -> Iterable[bytes]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        yield from file


def _is_config(tree: dict[str, Any]) -> bool:
    """Whether more keys are a configuration's own than a scenario's: one may be misspelt."""
    ours, theirs = ({field.encode_name for field in msgspec.structs.fields(record)} for record in (Config, Scenario))
    num_config, num_scenario = len(tree.keys() & (ours - theirs)), len(tree.keys() & (theirs - ours))
    return num_config > num_scenario or (num_config == num_scenario and isinstance(tree.get("model"), dict))


def _present_model(name: str, field: str, notes: list[str]) -> str:
    if name == QUICK or name in KNOWN_MODELS:
        return name
    if Path(name).exists():
        return str(Path(name).absolute())
    notes.append(f"{field} {name} does not exist: the sizes of {DEFAULT_MODEL} are simulated in its place")
    return DEFAULT_MODEL


def _given_traces(wanted: Wanted, group_size: int) -> TracesPart | None:
    if wanted.traces is None:
        return None
    return TracesPart(path=str(Path(wanted.traces).absolute()), group_size=group_size, tool_s=wanted.tool_s)


def _traces(scenario: Scenario) -> TracesPart:
    assert scenario.traces is not None  # read_scenario: one of the two is given
    return scenario.traces


def _quick_architecture() -> Architecture:
    recipe = QuickPolicyRecipe()
    return Architecture(
        name=QUICK,
        num_layers=recipe.num_layers,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_heads=recipe.num_heads,
        num_kv_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        vocab_size=recipe.vocab_size,
        is_tied=True,
    )


def split_overrides(words: Sequence[str]) -> tuple[str, ...]:
    """The overrides among what stands behind the file.

    Raises:
        InputError: a word is none.
    """
    for word in words:
        if "=" not in word:
            raise InputError(f"one SCENARIO must be given, with KEY=VALUE overrides behind it, got {word!r} too")
    return tuple(words)
