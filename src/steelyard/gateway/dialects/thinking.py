"""Reasoning between ``<think>`` marks, told apart from the answer, so that both together are exactly what was sampled.

::

    "<think>\\n" "why" "\\n</think>\\n\\n" "answer"
      opening  thinking    closing        text          signature = opening and closing
"""

import base64
import binascii
import re

import msgspec

_OPEN = "<think>"
_OPENING = re.compile(r"\s*<think>\n?")
_CLOSING = re.compile(r"\n?</think>\n*")
_TAIL = "\n</think>"
_USUAL = (f"{_OPEN}\n", f"{_TAIL}\n\n")


def signature_of(opening: str, closing: str) -> str:
    """What a client sends back with the reasoning, and what it needs not understand."""
    return base64.urlsafe_b64encode(msgspec.json.encode((opening, closing))).decode("ascii")


def joined(thinking: str, signature: str) -> str:
    """The sampled text of a reasoning that comes back; one that is not ours gets the usual marks."""
    try:
        opening, closing = msgspec.json.decode(base64.urlsafe_b64decode(signature), type=tuple[str, str])
    except (binascii.Error, msgspec.MsgspecError, ValueError):
        opening, closing = _USUAL
    return opening + thinking + closing


class ThinkingSplitter:
    """Takes a text in pieces, gives ``(kind, text)`` parts: ``thinking``, its ``signature`` and ``text``.

    Args:
        is_open: whether the prompt ends within a reasoning, so that the text begins with it.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._state = "thinking" if is_open else "start"
        self._opening = ""
        self._held = ""

    def push(self, delta: str) -> list[tuple[str, str]]:
        """Add a piece; the parts that are certain by now."""
        self._held += delta
        return self._parts(is_last=False)

    def finish(self) -> list[tuple[str, str]]:
        """The rest."""
        return self._parts(is_last=True)

    def _parts(self, *, is_last: bool) -> list[tuple[str, str]]:
        parts: list[tuple[str, str]] = []
        if self._state == "start":
            self._begin(is_last=is_last)
        if self._state == "thinking":
            parts += self._think(is_last=is_last)
        if self._state == "text" and self._held:
            parts.append(("text", self._held))
            self._held = ""
        return parts

    def _begin(self, *, is_last: bool) -> None:
        found = _OPENING.match(self._held)
        if found is not None:
            if found.end() == len(self._held) and not found[0].endswith("\n") and not is_last:
                return  # a newline may follow, which belongs to the mark
            self._opening, self._held = found[0], self._held[found.end() :]
            self._state = "thinking"
        elif is_last or not _OPEN.startswith(self._held.lstrip()):
            self._state = "text"

    def _think(self, *, is_last: bool) -> list[tuple[str, str]]:
        found = _CLOSING.search(self._held)
        if found is not None:
            if found.end() == len(self._held) and not is_last:
                return []  # more newlines may follow, which belong to the mark
            thinking, closing = self._held[: found.start()], found[0]
            self._held, self._state = self._held[found.end() :], "text"
        elif is_last:
            thinking, closing, self._held, self._state = self._held, "", "", "text"
        else:
            longest = min(len(_TAIL) - 1, len(self._held))
            keep = next((n for n in range(longest, 0, -1) if _may_close(self._held[-n:])), 0)
            thinking = self._held[: len(self._held) - keep]
            self._held = self._held[len(thinking) :]
            return [("thinking", thinking)] if thinking else []
        signature = ("signature", signature_of(self._opening, closing))
        return [("thinking", thinking), signature] if thinking else [signature]


def _may_close(end: str) -> bool:
    """Whether a text that ends so may go on to the closing mark."""
    return _TAIL.startswith(end) or _TAIL[1:].startswith(end)
