"""Starting and resuming a run from the command line: directory, lock, log, display, policy, control, report."""

import asyncio
import contextlib
import os
import platform
import signal
import sys
from collections import deque
from pathlib import Path
from typing import TextIO

import uvloop

from steelyard import config_file
from steelyard.clock import SystemClock
from steelyard.config import Config
from steelyard.config_notes import notes
from steelyard.coordinator.events import RunFinished
from steelyard.coordinator.journal.base import decode
from steelyard.environments.base import Services
from steelyard.environments.registry import make_environment
from steelyard.errors import SteelyardError, StorageFailed
from steelyard.log import log_to_file
from steelyard.metrics import MetricsFile
from steelyard.observe.display import make_display
from steelyard.observe.progress import RunPlan
from steelyard.observe.report import ReportInput, installed_versions, write_report
from steelyard.observe.rows import StageName, read_rows
from steelyard.processes.faults import FaultPlan
from steelyard.processes.garbage import collect_rarely
from steelyard.run.blob_place import check_place, with_own_folder
from steelyard.run.control import RunContext, run_control
from steelyard.run.directory import RunDirectory, RunLock, existing_directory, new_directory, write_config
from steelyard.run.engines import check_engine
from steelyard.run.evaluation import num_planned
from steelyard.run.harnesses import check_harness
from steelyard.run.journals import check_journal, open_journal_reader, require_new_journal
from steelyard.run.news import News
from steelyard.run.policy import check_policy, prepare_policy
from steelyard.run.predicting import calibration_of, prediction_of
from steelyard.run.scratch import scratch_folder
from steelyard.run.tolerances import check_tolerances
from steelyard.sandbox.function_calls import run_function_calls
from steelyard.trainer.quick_recipe import WarmUpProgress

_WARM_UP_NEWS_EVERY = 50


def check_environment(config: Config) -> None:
    """Check what lies outside the configuration's own arithmetic: the environment's options, the policy's files.

    Raises:
        ConfigError: names the field.
    """
    make_environment(config.environment.kind, config.environment.options, Services(run_function=run_function_calls))
    check_harness(config)
    check_policy(config)
    check_tolerances(config)
    check_engine(config)
    check_journal(config)
    calibration_of(config)


def start(config: Config, *, cache_dir: Path, fault: FaultPlan | None = None) -> int:
    """Start a new run and carry it through; returns the exit code.

    Raises:
        InputError: the configuration or the directory cannot be used; nothing was started.
        RunError: the run failed and can be resumed.
    """
    check_environment(config)
    check_place(config.blobs)
    directory = new_directory(config.run.name, config.run.dir)
    config = with_own_folder(config, directory)
    with RunLock(directory):
        require_new_journal(config, directory)
        write_config(config, directory)
        return _carry_through(config, directory, cache_dir, fault)


def resume(path: str, *, cache_dir: Path, fault: FaultPlan | None = None) -> int:
    """Go on with a run, with its own configuration; returns the exit code.

    Raises:
        InputError: there is no run at ``path``, or another process works on it.
        RunError: the run failed again and can be resumed.
    """
    directory = existing_directory(path)
    with RunLock(directory):
        config = config_file.load(directory.config)
        if is_finished(config, directory):
            _say(sys.stdout, f"{shown(directory)} is finished: there is nothing to go on with")
            return 0
        return _carry_through(config, directory, cache_dir, fault)


def is_finished(config: Config, directory: RunDirectory) -> bool:
    """Whether the last event of the run's journal is RUN_FINISHED.

    Raises:
        IntegrityError: it is no journal.
        StorageFailed: it cannot be read.
    """
    kind = config.journal.kind
    if kind == "memory" or (kind == "sqlite" and not directory.journal.is_file()):
        return False
    reader = open_journal_reader(config, directory)
    last = deque(reader.records_after(reader.head().number - 1), maxlen=1)
    return bool(last) and isinstance(decode(last[0].payload), RunFinished)


def _carry_through(config: Config, directory: RunDirectory, cache_dir: Path, fault: FaultPlan | None) -> int:
    """Run to the end; whatever ends it before, the user is told how to go on."""
    try:
        _run_with_news(config, directory, cache_dir, fault)
    except KeyboardInterrupt:
        _say(sys.stderr, f"interrupted; to go on, type: steelyard train --resume {shown(directory)}")
        raise
    except (SteelyardError, OSError) as error:
        _say(sys.stderr, f"to go on once that is mended, type: steelyard train --resume {shown(directory)}")
        if isinstance(error, OSError):
            raise StorageFailed(str(error)) from error
        raise
    _say(sys.stdout, f"run directory: {shown(directory)}")
    if config.observe.report:
        _say(sys.stdout, f"report: {shown(directory)}/report.html")
    return 0


def _run_with_news(config: Config, directory: RunDirectory, cache_dir: Path, fault: FaultPlan | None) -> None:
    clock = SystemClock()
    plan = RunPlan(run_name=directory.path.name, max_steps=config.train.max_steps, num_evaluations=num_planned(config))
    with (
        contextlib.closing(log_to_file(directory.log)),
        contextlib.closing(MetricsFile(directory.metrics)) as metrics,
        contextlib.closing(make_display(config.observe.display, sys.stdout, clock, plan)) as display,
    ):
        news = News(metrics, display, clock)
        for note in notes(config):
            news.note(note)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(config, directory, cache_dir, news, fault))
        if config.observe.report:
            news.stage(StageName.REPORT)
            make_report(config, directory, clock.now_s())
        news.stage(StageName.DONE)


async def _run(config: Config, directory: RunDirectory, cache_dir: Path, news: News, fault: FaultPlan | None) -> None:
    # A polite kill (a batch system, a container that stops) ends the run as Ctrl-C does.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    policy_dir = await _policy_dir(config, directory, cache_dir, news)
    news.compare_with(prediction_of(config, policy_dir))
    context = RunContext(
        config=config,
        directory=directory,
        policy_dir=policy_dir,
        news=news,
        fault=fault,
    )
    collect_rarely()  # a call of the gateway must not wait while the heap of the whole run is searched
    await run_control(context)


async def _policy_dir(config: Config, directory: RunDirectory, cache_dir: Path, news: News) -> Path:
    """The starting policy; a run that has published a version does not need it any more."""
    if (first := directory.first_version()) is not None:
        return first
    news.stage(StageName.PREPARE_POLICY)

    def on_progress(progress: WarmUpProgress) -> None:
        if progress.step % _WARM_UP_NEWS_EVERY == 0:
            news.stage(
                StageName.PREPARE_POLICY, f"step {progress.step} of {progress.num_steps}, loss {progress.loss:.2f}"
            )

    with scratch_folder() as folder:
        return await prepare_policy(config, cache_dir, folder, os.getpid(), on_progress, news.note)


def make_report(config: Config, directory: RunDirectory, now_s: float) -> None:
    """Write ``report.html`` from the rows so far.

    Raises:
        StorageFailed: the disk refuses.
    """
    report = ReportInput(
        rows=read_rows(directory.metrics),
        run_name=directory.path.name,
        run_path=shown(directory),
        config_text=config_file.to_yaml(config),
        versions=installed_versions(platform.python_version(), platform.platform()),
        made_at_s=now_s,
    )
    write_report(directory.report, report)


def shown(directory: RunDirectory) -> str:
    """The path as the user would type it."""
    try:
        return str(directory.path.relative_to(Path.cwd()))
    except ValueError:
        return str(directory.path)


def _say(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()
