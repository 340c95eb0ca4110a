"""A real PostgreSQL server for tests, in a directory of its own and on a Unix socket only; and a line to it that fails.

The server's programs are looked for on PATH and where Debian puts them. They refuse to run as root, so a root test
runs them as ``nobody``.
"""

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
from psycopg import sql

_START_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 30.0
_READY = "database system is ready to accept connections"
_USER = "steelyard"
GUARDED = "guarded"
"""The only database that asks for a password, which is ``PASSWORD``."""
PASSWORD = "opensesame"
_ACCESS = f"local {GUARDED} all scram-sha-256\nlocal all all trust\n"


def missing() -> str | None:
    """Why no server can be started here; None where one can."""
    if _find("initdb") is None:
        return "initdb must be on PATH or in /usr/lib/postgresql/*/bin (Debian: apt install postgresql)"
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return "setpriv must be on PATH: the server does not run as root"
    return None


def _find(program: str) -> str | None:
    """The program on PATH, else of the newest version that Debian has installed."""
    installed = [path for path in Path("/usr/lib/postgresql").glob(f"*/bin/{program}") if path.parts[4].isdecimal()]
    newest = max(installed, key=lambda path: int(path.parts[4]), default=None)
    return shutil.which(program) or (None if newest is None else str(newest))


class PostgresServer:
    """One server with durable commits and page checksums. Made by :func:`postgres_server`.

    Args:
        directory: empty, and owned by whoever the server runs as.
    """

    def __init__(self, directory: Path) -> None:
        self.data = directory / "data"
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self._log: list[str] = []
        self._reading: threading.Thread | None = None
        self._num_databases = 0
        self._shared: str | None = None

    @property
    def pid(self) -> int:
        """Of the server's first process."""
        if self._process is None:
            raise AssertionError("the server must be running")
        return self._process.pid

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self._directory / ".s.PGSQL.5432"

    def url(self, database: str = "postgres", *, socket_directory: Path | None = None) -> str:
        """The connection URL of a database, through the server's socket or one in another directory."""
        return f"postgresql://{_USER}@/{database}?host={socket_directory or self._directory}"

    def new_database(self, name: str | None = None) -> str:
        """Make an empty database; its URL."""
        self._num_databases += 1
        name = name or f"test_{self._num_databases}"
        self.run("postgres", sql.SQL("create database {}").format(sql.Identifier(name)))
        return self.url(name)

    def shared_database(self) -> str:
        """A database for all who need none of their own; its URL."""
        if self._shared is None:
            self._shared = self.new_database("shared")
        return self._shared

    def run(self, database: str, *statements: sql.Composed | str) -> None:
        """Run statements as the superuser."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement if isinstance(statement, sql.Composed) else statement.encode())

    @contextlib.contextmanager
    def option(self, name: str, value: str) -> Iterator[None]:
        """Another setting for connections that are made in the block."""
        before = self._current(name)
        self._set_option(name, value)
        try:
            yield
        finally:
            self._set_option(name, before)

    def _set_option(self, name: str, value: str) -> None:
        setting = sql.SQL("alter system set {} = {}").format(sql.Identifier(name), sql.Literal(value))
        self.run("postgres", setting, "select pg_reload_conf()")
        ends_at_s = time.monotonic() + _START_DEADLINE_S
        while self._current(name) != value:
            # The server reads its files when it comes to it, and tells nobody; each look is a connection, so it rests.
            assert time.monotonic() < ends_at_s, f"the server must take {name} = {value}"

    def _current(self, name: str) -> str:
        with psycopg.connect(self.url()) as connection:
            row = connection.execute("select current_setting(%s)", (name,)).fetchone()
        assert row is not None
        return str(row[0])

    @contextlib.contextmanager
    def full_disk(self, max_file_bytes: int) -> Iterator[None]:
        """Connections that are made in the block can write no longer file."""
        self._limit_files(str(max_file_bytes))
        try:
            yield
        finally:
            self._limit_files("unlimited")

    def _limit_files(self, limit: str) -> None:
        # By a program that runs as the server does, for root itself may not be allowed to.
        command = [*_unprivileged(), "prlimit", "--pid", str(self.pid), f"--fsize={limit}:"]
        subprocess.run(command, check=True, timeout=_STOP_DEADLINE_S)

    def make(self) -> None:
        """Lay out the server's files."""
        command = [_program("initdb"), "--pgdata", str(self.data), "--username", _USER, "--auth", "trust"]
        command += ["--encoding", "UTF8", "--locale", "C", "--data-checksums", "--no-sync"]
        done = subprocess.run(
            [*_unprivileged(), *command], capture_output=True, text=True, check=False, cwd=self._directory,
            timeout=_START_DEADLINE_S,
        )  # fmt: skip
        if done.returncode:
            raise AssertionError(f"initdb failed: {done.stderr}")
        (self.data / "pg_hba.conf").write_text(_ACCESS)

    def start(self) -> None:
        """Start, and wait until it accepts connections. It ends with the thread that has started it.

        Raises:
            AssertionError: it does not, within a deadline; shows its log.
        """
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._directory),
            "shared_buffers": "16MB",
            "log_min_messages": "error",
        }
        command = [_program("postgres"), "-D", str(self.data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        self._log.clear()
        self._process = subprocess.Popen(
            [*_unprivileged(), *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, cwd=self._directory,
        )  # fmt: skip
        ready = threading.Event()
        self._reading = threading.Thread(target=self._read_log, args=(self._process, ready), daemon=True)
        self._reading.start()
        if not ready.wait(_START_DEADLINE_S) or _READY not in "".join(self._log):
            self.kill()
            raise AssertionError(f"the server must start within {_START_DEADLINE_S:.0f} s; {''.join(self._log)}")

    def stop(self) -> None:
        """End all connections and stop in order; nothing where it does not run."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End it at once, as a crash does; the next start recovers."""
        self._end(signal.SIGQUIT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_DEADLINE_S)
        if self._reading is not None:
            self._reading.join(_STOP_DEADLINE_S)
        self._process = None

    def _read_log(self, process: "subprocess.Popen[str]", ready: threading.Event) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self._log.append(line)
                if _READY in line:
                    ready.set()
        ready.set()  # it has ended


def _program(name: str) -> str:
    found = _find(name)
    if found is None:
        raise AssertionError(missing())
    return found


def _unprivileged() -> list[str]:
    """What makes a command end with this process, and run as nobody where we are root."""
    if shutil.which("setpriv") is None:
        return []
    command = ["setpriv", "--pdeathsig", "QUIT"]
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        command += [f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
    return [*command, "--"]


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A running server; it is stopped and deleted at the end of the block.

    Raises:
        AssertionError: it cannot be started; see :func:`missing`.
    """
    # Not below a test's own folder: those are their owner's alone, and a socket's path must be short.
    directory = Path(tempfile.mkdtemp(prefix="steelyard-pg-"))
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(directory, nobody.pw_uid, nobody.pw_gid)
    server = PostgresServer(directory)
    try:
        server.make()
        server.start()
        guard = sql.SQL("alter role {} password {}").format(sql.Identifier(_USER), sql.Literal(PASSWORD))
        server.run("postgres", guard)
        server.new_database(GUARDED)
        yield server
    finally:
        server.kill()  # what it would write in order is deleted anyhow
        shutil.rmtree(directory, ignore_errors=True)


class FailingLine:
    """A Unix socket that passes all on to a server's, until it fails.

    Args:
        upstream: the server's socket.
        directory: where to listen, under the name of the server's socket.
    """

    def __init__(self, upstream: Path, directory: Path) -> None:
        self.directory = directory
        self.num_lost = 0
        self._upstream = upstream
        self._is_mute = False
        self._is_cut_at_answer = False
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, self.directory / self._upstream.name)

    def lose_answer(self) -> None:
        """The next answer of the server is lost, and the connection with it."""
        self._is_cut_at_answer = True

    def go_mute(self) -> None:
        """From now on nothing passes in either direction, and no connection ends."""
        self._is_mute = True

    async def stop(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._upstream)

        def close() -> None:
            writer.close()
            upstream_writer.close()

        for source, target, is_answer in ((reader, upstream_writer, False), (upstream_reader, writer, True)):
            pump = asyncio.create_task(self._pump(source, target, close, is_answer=is_answer))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, close: Callable[[], None], *, is_answer: bool
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                if is_answer and self._is_cut_at_answer:
                    self._is_cut_at_answer = False
                    self.num_lost += 1
                    return
                if not self._is_mute:
                    target.write(data)
                    await target.drain()
        except ConnectionError:
            pass
        finally:
            close()
