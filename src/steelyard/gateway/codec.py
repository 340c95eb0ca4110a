"""Text to tokens and back, with a wall between control tokens and content.

A control token is an added token of the tokenizer: ``<|im_end|>``, ``<tool_call>`` and the like. Only the
chat template may write one. Content is *guarded* before the template sees it: each control string in it is
replaced by an escape that no control token matches. After rendering, the text is cut at the control strings
that are left, which are the template's own, and everything between is restored and encoded by a tokenizer
that knows no added tokens at all.
"""

import functools
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from steelyard.errors import InputError
from steelyard.gateway.token_text import TokenBytes, is_byte_level
from steelyard.gateway.words import WordEncoder, encodes_alike, word_cutters, word_encoder

_ESCAPE = "\U0010fffd"
_FIRST_STAND_IN = 0x100000
_CACHED_PIECES = 1024
_CACHED_NAMES = 4096
_CACHED_NAME_CHARS = 64
_WITHOUT_ADDED: dict[str, Any] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
_CACHED_PIECE_CHARS = 4096


class ControlToken(msgspec.Struct, frozen=True):
    """An added token. ``strips_left`` and ``strips_right``: it takes the white space beside it."""

    token_id: int
    text: str
    is_special: bool
    strips_left: bool
    strips_right: bool


class TokenCodec:
    """Encodes rendered templates and decodes sampled tokens.

    Args:
        tokenizer_json: the content of a Hugging Face ``tokenizer.json``.

    Raises:
        InputError: the content is no tokenizer, or the tokenizer cannot write one of its control strings as
            ordinary text, so that content could become a control token.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        description = msgspec.json.decode(tokenizer_json, type=dict[str, Any])
        self.control_tokens = tuple(_control_token(entry) for entry in description.get("added_tokens", ()))
        self._tokenizer = _tokenizer(tokenizer_json.decode("utf-8"))
        self.num_ids = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._plain_start = _tokenizer(_without_added_tokens(description, is_start=True))
        self._plain_rest = _tokenizer(_without_added_tokens(description, is_start=False))
        self._words = _word_encoder(description, self._plain_rest)
        self._token_bytes = TokenBytes(self._tokenizer.id_to_token) if is_byte_level(description) else None
        self._encode_cached = functools.lru_cache(_CACHED_PIECES)(self._encode_piece)
        texts = sorted((token.text for token in self.control_tokens), key=len, reverse=True)
        chars = sorted({char for text in texts for char in text})
        originals = list(dict.fromkeys([_ESCAPE, *texts, *chars]))
        self._stand_ins = {text: _ESCAPE + chr(_FIRST_STAND_IN + i) for i, text in enumerate(originals)}
        self._originals = {stand_in: text for text, stand_in in self._stand_ins.items()}
        self._guard_all = _Guard(texts, self._stand_ins)
        self._by_text = {token.text: token.token_id for token in self.control_tokens}
        self._split = re.compile("|".join(_pattern(t) for t in sorted(self.control_tokens, key=lambda t: -len(t.text))))
        self._require_wall()

    @classmethod
    def load(cls, directory: Path) -> "TokenCodec":
        """Read ``tokenizer.json`` of a Hugging Face directory.

        Raises:
            InputError: there is none, or it is not a tokenizer.
        """
        path = directory / "tokenizer.json"
        try:
            return cls(path.read_bytes())
        except FileNotFoundError:
            raise InputError(f"a model directory must hold tokenizer.json, but there is no {path}") from None
        except (msgspec.DecodeError, KeyError) as error:
            raise InputError(f"{path} is not a tokenizer: {error}") from error

    def guard(self, text: str) -> str:
        """``text`` with its control strings escaped, for use as content in a template."""
        return self._guard_all.apply(text)

    def guard_except(self, marks: Collection[str]) -> Callable[[str], str]:
        """A guard that leaves ``marks`` (such as ``<think>``) as they are, so that a template can look for them.

        For assistant messages, whose own tokens they were.
        """
        texts = [token.text for token in self.control_tokens if token.text not in marks]
        return _Guard(sorted(texts, key=len, reverse=True), self._stand_ins).apply

    def restore(self, text: str) -> str:
        """Undo :meth:`guard`."""
        if _ESCAPE not in text:
            return text
        return re.sub(f"{_ESCAPE}.", lambda match: self._originals.get(match[0], match[0]), text, flags=re.DOTALL)

    def encode(self, text: str, *, is_start: bool = True) -> list[int]:
        """Token ids of guarded text; control strings that are not escaped become control tokens.

        Args:
            is_start: whether ``text`` stands at the start of the sequence, where some tokenizers add a space.
        """
        if not self.control_tokens:
            return list(self._encode_text(self.restore(text), is_start))
        token_ids: list[int] = []
        position = 0
        for match in self._split.finditer(text):
            if match.start() > position:
                token_ids += self._encode_text(self.restore(text[position : match.start()]), is_start and not position)
            token_ids.append(self._by_text[match[0].strip() if match[0] not in self._by_text else match[0]])
            position = match.end()
        if position < len(text):
            token_ids += self._encode_text(self.restore(text[position:]), is_start and not position)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled tokens, control tokens included. Bytes that are no UTF-8 become U+FFFD."""
        if self._token_bytes is not None:
            return self._token_bytes.decode(token_ids)
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def first_control(self, text: str, start: int, among: frozenset[int] | None = None) -> tuple[int, int, int] | None:
        """(token id, start, end) of the first control token in ``text`` from ``start`` on; of those in ``among``."""
        for match in self._split.finditer(text, start) if self.control_tokens else ():
            token_id = self._by_text.get(match[0], self._by_text.get(match[0].strip()))
            if token_id is not None and (among is None or token_id in among):
                return token_id, match.start(), match.end()
        return None

    def token_id(self, text: str) -> int | None:
        """The id of a control token by its text."""
        return self._by_text.get(text)

    def _encode_text(self, text: str, is_start: bool) -> Sequence[int]:
        if len(text) <= _CACHED_PIECE_CHARS:
            return self._encode_cached(text, is_start)
        return self._encode_piece(text, is_start)

    def _encode_piece(self, text: str, is_start: bool) -> tuple[int, ...]:
        if self._words is not None and text.isascii():
            return self._words.encode(text)
        tokenizer = self._plain_start if is_start else self._plain_rest
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    def _require_wall(self) -> None:
        for token in self.control_tokens:
            if token.is_special and token.token_id in self._encode_piece(token.text, False):
                raise InputError(
                    f"content must never become a control token, but this tokenizer encodes the text {token.text!r}"
                    f" as its control token {token.token_id}"
                )


class _Guard:
    """Escapes control strings, and the beginnings and ends of them at the edges of a text.

    The edges matter because a template may join two contents: ``<|im_`` and ``end|>``.
    """

    def __init__(self, texts: Sequence[str], stand_ins: dict[str, str]) -> None:
        self._stand_ins = stand_ins
        self._pattern = re.compile("|".join(re.escape(text) for text in (*texts, _ESCAPE)))
        self._heads = frozenset(text[:i] for text in texts for i in range(1, len(text)))
        self._tails = frozenset(text[i:] for text in texts for i in range(1, len(text)))
        self._max_chars = max((len(text) for text in texts), default=1)
        self._edge_chars = re.compile(
            "|".join(sorted({re.escape(char) for text in texts for char in text[:1] + text[-1:]}))
        )
        self._apply_cached = functools.lru_cache(_CACHED_NAMES)(self._apply)

    def apply(self, text: str) -> str:
        """``text`` escaped; roles, names and keys come again and again, so short texts are kept."""
        return self._apply_cached(text) if len(text) <= _CACHED_NAME_CHARS else self._apply(text)

    def _apply(self, text: str) -> str:
        starts = self._edges(text)
        if not starts and self._pattern.search(text) is None:
            return text
        pieces = []
        position = 0
        for edge in sorted(starts):
            pieces += [self._replace(text[position:edge]), self._stand_ins[text[edge]]]
            position = edge + 1
        pieces.append(self._replace(text[position:]))
        return "".join(pieces)

    def _replace(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._stand_ins[match[0]], text)

    def _edges(self, text: str) -> set[int]:
        """Positions to escape: where a control string may begin before the end, or end after the start.

        White space at the edges is looked through, since templates trim.
        """
        num_chars = len(text.rstrip())
        first = len(text) - len(text.lstrip())
        positions: set[int] = set()
        if not (
            self._edge_chars.search(text, first, first + self._max_chars)
            or self._edge_chars.search(text, max(first, num_chars - self._max_chars))
        ):
            return positions
        for length in range(1, min(self._max_chars, num_chars - first) + 1):
            if text[num_chars - length : num_chars] in self._heads:
                positions.add(num_chars - length)
            if text[first : first + length] in self._tails:
                positions.add(first + length - 1)
        return positions


def _word_encoder(description: dict[str, Any], plain: Tokenizer) -> WordEncoder | None:
    """The faster way to the same tokens, for tokenizers that have one."""
    cutters = word_cutters(description)
    if cutters is None:
        return None
    encoder = WordEncoder(cutters, word_encoder(plain.model))
    is_alike = encodes_alike(encoder, lambda text: tuple(plain.encode(text, add_special_tokens=False).ids))
    return encoder if is_alike else None


def _tokenizer(description: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(description)
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"tokenizer.json is not a tokenizer: {error}") from error


def _control_token(entry: dict[str, Any]) -> ControlToken:
    return ControlToken(entry["id"], entry["content"], entry["special"], entry["lstrip"], entry["rstrip"])


def _pattern(token: ControlToken) -> str:
    left = r"\s*" if token.strips_left else ""
    right = r"\s*" if token.strips_right else ""
    return left + re.escape(token.text) + right


def _without_added_tokens(description: dict[str, Any], *, is_start: bool) -> str:
    """The tokenizer without added tokens, post-processing, truncation and padding, as JSON.

    A ``Metaspace`` that puts a space before the first word only must not do so in later pieces.
    """
    plain = {**description, **_WITHOUT_ADDED}
    if not is_start:
        plain["pre_tokenizer"] = _never_first(plain.get("pre_tokenizer"))
    return msgspec.json.encode(plain).decode("utf-8")


def _never_first(part: Any) -> Any:
    if isinstance(part, list):
        return [_never_first(entry) for entry in part]
    if not isinstance(part, dict):
        return part
    changed = {key: _never_first(value) for key, value in part.items()}
    if changed.get("type") == "Metaspace" and changed.get("prepend_scheme") == "first":
        changed["prepend_scheme"] = "never"
    return changed
