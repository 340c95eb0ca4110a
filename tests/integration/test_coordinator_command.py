"""``steelyard coordinator``, ``key`` and ``cancel`` as a user types them."""

import asyncio
import random
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import yaml

from steelyard.cli.main import EXIT_BAD_INPUT, EXIT_CHECK_FAILED, EXIT_DONE, EXIT_RUN_FAILED, main
from steelyard.coordinator import events as e
from steelyard.coordinator.client import CoordinatorClient
from steelyard.coordinator.trainer_link import TrainerLink
from steelyard.errors import Refused
from steelyard.ids import RandomIds
from steelyard.metrics import Counters
from steelyard.testing.postgres import PostgresServer
from steelyard.testing.rehearsal import Foreground
from steelyard.testing.run_rig import make_manifest, make_proof
from steelyard.testing.small_runs import command, journal_events, write_small_config
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.types import Lease

DEADLINE_S = 60.0


def write_config(home: Path) -> Path:
    path = home / "run.yaml"
    tree = {"run": {"dir": str(home / "run")}, "rollout": {"group_size": 2}, "train": {"batch_size": 4, "max_steps": 3}}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def start(target: Path, home: Path, *overrides: str) -> Foreground:
    return Foreground(command("coordinator", target, *overrides), home / "stderr")


def key_of(run: Path, role: str, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["key", str(run), role, name]) == EXIT_DONE
    return capsys.readouterr().out.strip()


def url_of(run: Path) -> str:
    return (run / "coordinator.url").read_text().strip()


def ask(run: Path, key: str, question: Callable[[CoordinatorClient], Awaitable[object]], *other_urls: str) -> object:
    """Ask the coordinator; ``other_urls`` are tried before its own."""

    async def asked() -> object:
        urls = (*other_urls, url_of(run))
        async with (
            CoordinatorClient(urls, key, ids=RandomIds(), counters=Counters(), draw=random.Random(0)) as client,
            asyncio.timeout(DEADLINE_S),
        ):
            return await question(client)

    return asyncio.run(asked())


async def publish_first(client: CoordinatorClient) -> None:
    link, manifest = TrainerLink(client), make_manifest(0, 0, None)
    await link.published(manifest)
    await link.loaded(make_proof(manifest))
    await link.ready(0)


@pytest.mark.timeout(180)
def test_a_run_is_served_until_told_to_stop_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with start(write_config(tmp_path), tmp_path) as serving:
        serving.wait_for(f"steelyard key {run} ROLE NAME")
        ask(run, key_of(run, "trainer", "t1", capsys), publish_first)
        worker = key_of(run, "worker", "w1", capsys)
        leases = ask(run, worker, lambda client: client.lease("w1", 1, 0.0))
        assert isinstance(leases, tuple)
        lease = leases[0]
        assert isinstance(lease, Lease)
        assert main(["coordinator", str(run)]) == EXIT_BAD_INPUT
        assert "is in use by another run" in capsys.readouterr().err
        assert main(["cancel", str(run), "--group", lease.group_id]) == EXIT_DONE
        assert capsys.readouterr().out == f"cancelled {lease.group_id}\n"
        assert main(["cancel", str(run), "--task", lease.task_id]) == EXIT_CHECK_FAILED
        serving.send(signal.SIGTERM)
        assert serving.wait(DEADLINE_S) == EXIT_DONE
    with start(run, tmp_path) as serving:
        serving.wait_for("listens at http://127.0.0.1:")
        lost = ask(run, worker, lambda client: client.heartbeat("w1", {lease.attempt_id: 1}))
        assert lost == (lease.attempt_id,)
        serving.send(signal.SIGINT)
        assert serving.wait(DEADLINE_S) == EXIT_DONE
    kinds = [type(event) for event in journal_events(run)]
    assert (kinds[0], kinds.count(e.RunResumed), kinds.count(e.Leased)) == (e.RunStarted, 1, 1)
    assert [event.reason for event in journal_events(run) if isinstance(event, e.GroupDropped)] == ["cancelled"]


@pytest.mark.timeout(120)
def test_a_trainer_that_gives_up_ends_the_coordinator_which_can_be_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with start(write_config(tmp_path), tmp_path) as serving:
        serving.wait_for(f"steelyard key {run} ROLE NAME")
        trainer = key_of(run, "trainer", "t1", capsys)
        ask(run, trainer, lambda client: TrainerLink(client).fail("no memory left"))
        assert serving.wait(DEADLINE_S) == EXIT_RUN_FAILED
        assert serving.stderr == "steelyard: trainer t1 cannot go on: no memory left\n"


@pytest.mark.timeout(180)
def test_on_postgres_a_second_coordinator_stands_by_and_goes_on_when_the_first_is_killed(
    tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = tmp_path / "run", write_config(tmp_path)
    journal = ("journal.kind=postgres", f"journal.url={postgres.new_database()}", "journal.name=a", "journal.lease_s=2")
    with start(config, tmp_path, *journal) as first:
        first.wait_for(f"steelyard key {run} ROLE NAME")
        ask(run, key_of(run, "trainer", "t1", capsys), publish_first)
        worker, first_url = key_of(run, "worker", "w1", capsys), url_of(run)
        leases = ask(run, worker, lambda client: client.lease("w1", 2, 0.0))
        with Foreground(command("coordinator", run), tmp_path / "second") as second:
            second.wait_for("standing by until its lease ends")
            first.send(signal.SIGKILL)
            second.wait_for("listens at http://127.0.0.1:")
            assert url_of(run) != first_url
            # A new client has started none of them: what was leased before is handed out again, not leased anew.
            again = ask(run, worker, lambda client: client.lease("w1", 2, 0.0), first_url)
            assert attempts(again) == attempts(leases)
            second.send(signal.SIGTERM)
            assert second.wait(DEADLINE_S) == EXIT_DONE
    assert main(["doctor", str(run)]) == EXIT_DONE
    assert "worker w1" in capsys.readouterr().out


def attempts(leases: object) -> list[str]:
    assert isinstance(leases, tuple)
    return sorted(lease.attempt_id for lease in leases)


@pytest.mark.timeout(120)
def test_a_port_in_use_is_bad_input_that_names_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start(write_config(tmp_path), tmp_path, f"coordinator.port={port}") as serving:
            assert serving.wait(DEADLINE_S) == EXIT_BAD_INPUT
            assert serving.stderr.startswith(f"steelyard: coordinator.port: 127.0.0.1:{port} must be free")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("coordinator", "missing.yaml"), "missing.yaml"),
        (("coordinator", "run.yaml", "coordinator.port=70000"), "coordinator.port must be <= 65535, got 70000"),
        (("coordinator", "run.yaml", "coordinator.port=-1"), "coordinator.port must be >= 0, got -1"),
        (("key", "nowhere", "worker", "w1"), "RUN must be a run directory, got nowhere"),
        (("key", "old", "worker", "no dots.please"), "worker_id: must be 1 to 64 letters"),
        (("key", "old", "worker", "w1", "--days", "0"), "--days must be > 0 and <= 3660, got 0.0"),
        (("cancel", "old", "--group", "grp_1"), "there is no coordinator.url"),
        (("cancel", "--group", "grp_1"), "either RUN must be given, or --coordinator URL with --key-file FILE"),
        (("cancel", "--coordinator", "http://x", "--key-file", "none", "--task", "t"), "--key-file must be a readable"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    write_config(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("run: {}\n")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.timeout(180)
def test_a_training_run_with_a_port_serves_workers_elsewhere_but_no_other_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = write_small_config(
        tmp_path,
        write_tiny_model(tmp_path / "policy"),
        run={"dir": str(run)},
        coordinator={"port": 0},
        train={"max_steps": 1000},
    )
    with Foreground(command("train", config), tmp_path / "stderr") as running:
        running.wait_for("workers and scorers elsewhere join at http://127.0.0.1:")
        assert ask(run, key_of(run, "worker", "w1", capsys), lambda client: client.heartbeat("w1", {"att_x": 1})) == (
            "att_x",
        )
        with pytest.raises(Refused, match="is not a call that a trainer may make here"):
            ask(run, key_of(run, "trainer", "t1", capsys), lambda client: TrainerLink(client).progress())
        assert main(["cancel", str(run), "--group", "grp_unknown"]) == EXIT_CHECK_FAILED
        running.send(signal.SIGTERM)
        running.wait(DEADLINE_S)
