"""The text of tokens by a table of their bytes, for byte-level tokenizers."""

from collections.abc import Callable, Sequence
from typing import Any

_PRINTED = (*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that a byte-level vocabulary writes as the character of the same number; the others follow from U+0100 on."""


def _byte_of_char() -> dict[str, int]:
    hidden = [byte for byte in range(256) if byte not in _PRINTED]
    return {chr(byte): byte for byte in _PRINTED} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_of_char()
CHAR_OF_BYTE = {byte: char for char, byte in _BYTE_OF_CHAR.items()}
"""How a byte-level vocabulary writes each byte; a table for ``str.translate`` of ASCII text."""


class TokenBytes(dict[int, bytes]):
    """The bytes of each token, found at its first use; ids without a token have none, and are not kept.

    Args:
        text_of: the vocabulary's entry for a token id.
    """

    def __init__(self, text_of: Callable[[int], str | None]) -> None:
        self._text_of = text_of

    def __missing__(self, token_id: int) -> bytes:
        text = self._text_of(token_id)
        if text is None:
            return b""
        try:
            found = bytes([_BYTE_OF_CHAR[char] for char in text])
        except KeyError:  # an added token, which need not be in the byte alphabet
            found = text.encode("utf-8")
        self[token_id] = found
        return found

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.__getitem__, token_ids)).decode("utf-8", "replace")


def is_byte_level(description: dict[str, Any]) -> bool:
    """Whether a ``tokenizer.json`` decodes by bytes and by nothing else."""
    return (description.get("decoder") or {}).get("type") == "ByteLevel"
