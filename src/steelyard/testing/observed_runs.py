"""A run directory as a run leaves it, with known times: a fake harness, engine and trainer on a manual clock."""

import json
from pathlib import Path

import msgspec

from steelyard.config import AdmissionConfig, Config, ResourcesConfig, RolloutConfig, TrainConfig
from steelyard.coordinator.journal.sqlite import SqliteJournal
from steelyard.metrics import MetricsFile
from steelyard.observe.rows import write_row
from steelyard.run.directory import RunDirectory, write_config
from steelyard.testing.metrics_rows import make_step
from steelyard.testing.run_rig import WORKER, RunRig, make_settings
from steelyard.testing.training_data import make_turn
from steelyard.traces.store import TraceStore
from steelyard.types import EndReason, Lease, Turn

START_S, TOOL_S, END_S, TOKEN_S, TRAIN_S, LOAD_S = 0.1, 0.2, 0.05, 0.01, 2.0, 0.8
"""What a run of :func:`write_run` consists of, in seconds: before an attempt's first call, between calls, after the
last, for each sampled token, for an optimizer step, until a replica has proven its weights."""

_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


async def write_run(path: Path, num_steps: int = 4) -> RunDirectory:
    """A run of ``num_steps`` steps over 2 groups of 2 rollouts, of two calls each: all attempts of a step at once, and
    then the step, so that nothing overlaps."""
    directory = RunDirectory(path)
    directory.make_folders()
    config = Config(
        admission=AdmissionConfig(max_policy_lag=0),
        rollout=RolloutConfig(group_size=2),
        train=TrainConfig(batch_size=4, max_steps=num_steps),
        resources=ResourcesConfig(rollout_gpus=1, train_gpus=1),
    )
    write_config(config, directory)
    directory.version(0).mkdir()
    (directory.version(0) / "config.json").write_text(json.dumps(_MODEL))
    (directory.version(0) / "manifest.json").write_text("{}")
    rig = await RunRig(make_settings(lag=0), journal=SqliteJournal(directory.journal)).start()
    store, metrics = TraceStore(directory.traces), MetricsFile(directory.metrics)
    for step in range(num_steps):
        while leases := await rig.coordinator.lease(WORKER, 100, 0.0):
            await _sample(rig, store, leases)
            await rig.score_all()
        await rig.begin(step)
        rig.clock.advance(TRAIN_S)
        number = await rig.publish(step + 1, is_ready=False)
        rig.clock.advance(LOAD_S)
        await rig.load(number)
        row = make_step(step, at_s=rig.clock.now_s(), max_steps=num_steps)
        write_row(metrics, msgspec.structs.replace(row, train_s=TRAIN_S, publish_s=0.0, load_s=LOAD_S))
    metrics.close()
    await store.close()
    await rig.coordinator.close()
    return directory


async def _sample(rig: RunRig, store: TraceStore, leases: tuple[Lease, ...]) -> None:
    """Attempts side by side; their artifacts come in the order in which they end."""
    began_s = rig.clock.now_s()
    ended = list[tuple[float, Lease]]()
    for number, lease in enumerate(leases):
        await rig.coordinator.start(lease.attempt_id, lease.attempt_number)
        turns = _turns(lease, began_s + START_S, 10 * (1 + number % 3))
        for turn in turns:
            store.append(turn)
        await store.seal(lease.attempt_id, EndReason.SUBMITTED, (), 0)
        ended.append((turns[-1].ended_at_s + END_S, lease))
    for ends_s, lease in sorted(ended, key=lambda pair: pair[0]):
        rig.clock.advance(max(0.0, ends_s - rig.clock.now_s()))
        await rig.coordinator.artifact_ready(rig.seal(lease))


def _turns(lease: Lease, at_s: float, num_tokens: int) -> tuple[Turn, Turn]:
    first = make_turn(range(30), range(num_tokens), attempt_id=lease.attempt_id)
    prompt = [*first.prompt_token_ids, *first.token_ids, *range(5)]
    second = make_turn(prompt, range(num_tokens), attempt_id=lease.attempt_id, turn_index=1)
    took_s = TOKEN_S * num_tokens
    again_s = at_s + took_s + TOOL_S
    held = len(first.prompt_token_ids) + len(first.token_ids)
    return (
        msgspec.structs.replace(first, started_at_s=at_s, ended_at_s=at_s + took_s),
        msgspec.structs.replace(second, started_at_s=again_s, ended_at_s=again_s + took_s, num_cached_tokens=held),
    )
