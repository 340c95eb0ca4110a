"""What our HTML pages share: where templates are, and how a page is put in place."""

import os
from datetime import UTC, datetime
from pathlib import Path

import jinja2

from steelyard.errors import StorageFailed

_TEMPLATES = Path(__file__).parent / "templates"


def page_template(name: str) -> jinja2.Template:
    """A template by its file's name; all that it prints is escaped, and what it does not know is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def write_page(path: Path, text: str) -> None:
    """Put a page in place in one move, so that an old one is never half replaced.

    Raises:
        StorageFailed: the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageFailed(f"{path} must be writable, got: {error.strerror}") from None


def moment(at_s: float) -> str:
    """A time for people, from seconds since the Unix epoch."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
