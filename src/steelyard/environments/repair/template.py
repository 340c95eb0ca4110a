"""What a function template is, and how it becomes text.

A template is written once with canonical names; a task renames them and fills the constants in. The
canonical form is what mutations, outputs and compiled functions are cached by: renaming changes no result.

Notation: ``source`` is the body of ``f``, one space per level. Names listed in :data:`NAMES` may be renamed;
``K`` and ``M`` are integers, ``C`` is a letter. ``doc`` says in words what ``f`` returns.
"""

import re
from collections.abc import Mapping

import msgspec

NAMES: dict[str, tuple[str, ...]] = {
    "a": ("a",),
    "b": ("b",),
    "best": ("best",),
    "c": ("c",),
    "hi": ("hi",),
    "i": ("i",),
    "lo": ("lo",),
    "n": ("n",),
    "out": ("out",),
    "s": ("s",),
    "t": ("t",),
    "w": ("w",),
    "ws": ("ws",),
    "x": ("x", "v"),
    "xs": ("xs", "nums"),
    "y": ("y",),
    "ys": ("ys",),
}
"""Canonical name to the names that a task may use for it. No name belongs to two of them.

Two of them vary. A policy whose tokens are whole lines meets each combination as lines of their own, and a two-minute
warm-up can hold so many.
"""

FUNCTION_NAME = "f"

_WORD = re.compile(r"\b[A-Za-z_]+\b")
_QUOTED = re.compile(r"('[^']*')")


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """A known-good function.

    Attributes:
        name: unique among templates.
        doc: what the function returns, with names and constants in braces.
        args: (canonical name, kind of value) of each argument; kinds are those of ``inputs.py``.
        source: the body, one statement a line.
        constants: (placeholder, least, greatest) of each integer.
        letters: placeholders of letters.
    """

    name: str
    doc: str
    args: tuple[tuple[str, str], ...]
    source: str
    constants: tuple[tuple[str, int, int], ...] = ()
    letters: tuple[str, ...] = ()

    def lines(self, constants: Mapping[str, str]) -> tuple[str, ...]:
        """The whole function in canonical names; the first line is its ``def``."""
        head = f"def {FUNCTION_NAME}({', '.join(name for name, _ in self.args)}):"
        body = rename(self.source, constants).rstrip("\n").split("\n")
        return (head, *(" " + line for line in body))

    def names(self) -> tuple[str, ...]:
        """The canonical names that occur, sorted."""
        words = words_in(self.source) | {name for name, _ in self.args}
        return tuple(sorted(words & NAMES.keys()))

    def describe(self, words: Mapping[str, str]) -> str:
        """``doc`` with names and constants filled in."""
        return self.doc.format_map(words)


def words_in(text: str) -> set[str]:
    """All words of ``text``: names, keywords, and what is quoted."""
    return set(_WORD.findall(text))


def rename(text: str, words: Mapping[str, str]) -> str:
    """Replace whole words outside quotes; words that are not in ``words`` stay."""
    pieces = _QUOTED.split(text)
    return "".join(
        piece if position % 2 else _WORD.sub(lambda match: words.get(match.group(), match.group()), piece)
        for position, piece in enumerate(pieces)
    )
