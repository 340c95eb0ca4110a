"""What holds for every test: in CI nothing may be skipped or expected to fail. And what many of them share."""

import itertools
import os
from collections.abc import Iterator

import hypothesis
import pytest

from steelyard.testing.postgres import PostgresServer, missing, postgres_server
from steelyard.testing.s3_server import CREDENTIALS, S3Server, s3_server

_BUCKETS = itertools.count()
IS_CI = os.environ.get("CI") == "true"

# How long an example takes says how busy the machine is, and must not decide a test.
hypothesis.settings.register_profile("any_machine", deadline=None)
hypothesis.settings.load_profile("any_machine")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not IS_CI:
        return
    for kind in ("skipped", "xfailed"):
        for report in terminalreporter.stats.get(kind, []):
            terminalreporter.write_line(f"not allowed in CI: {kind} {report.nodeid}: {report.longrepr}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if IS_CI and reporter is not None and (reporter.stats.get("skipped") or reporter.stats.get("xfailed")):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A running PostgreSQL server, started when the first test asks for it."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A real S3 server. Whoever runs the tests may have credentials and settings of their own: they are not used."""
    with pytest.MonkeyPatch.context() as environment, s3_server() as server:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            environment.delenv(name)
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """The name of a new bucket."""
    name = f"bucket-{next(_BUCKETS)}"
    s3.make_bucket(name)
    return name
