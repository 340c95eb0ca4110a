"""Logging: one JSON object a line into ``log.jsonl``. Ids, never payloads or keys."""

import contextlib
import logging
from pathlib import Path

import msgspec


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, where, message, and the error if any."""

    def format(self, record: logging.LogRecord) -> str:
        row = {
            "at_s": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(row).decode()


class _LogFile(logging.FileHandler):
    """A log that cannot be written is not the end of the run, and no reason to fill the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the base class calls it so)
        """Drop the record."""

    def close(self) -> None:
        """Close the file; what it could not take is dropped."""
        with contextlib.suppress(OSError):
            super().close()


def log_to_file(path: Path, level: int = logging.INFO) -> logging.Handler:
    """Send everything that is logged to ``path``; returns the handler so that it can be closed."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.setLevel(level)
    root.addHandler(handler)
    return handler


def log_to_stderr(level: int = logging.INFO) -> None:
    """For child processes, whose standard error is a log file of the run directory."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
