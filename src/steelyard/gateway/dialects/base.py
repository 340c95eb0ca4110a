"""What a dialect is: bodies to requests, completions to bytes, failures to error objects.

::

    body --read--> Asked(jobs, replies)     jobs --gateway--> Completion --Replies--> JSON or events
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from steelyard.gateway.failures import Failure, FailureKind, bad_request
from steelyard.gateway.planning import TextRequest
from steelyard.gateway.service import Completion
from steelyard.ids import IdSource
from steelyard.types import ChatRequest, Turn

Job = ChatRequest | TextRequest
POLICY_NAME = "steelyard-policy"

_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`")
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")

BodyT = TypeVar("BodyT")


class Replies(Protocol):
    """Says in one dialect what the policy answered to one request; one choice for each job."""

    def whole(self, completions: Sequence[Completion]) -> bytes:
        """The JSON of the whole reply."""
        ...

    def start(self, index: int, num_prompt_tokens: int) -> bytes:
        """Events that open the stream of choice ``index``."""
        ...

    def text(self, index: int, delta: str) -> bytes:
        """Events for a piece of content."""
        ...

    def reasoning(self, index: int, delta: str) -> bytes:
        """Events for a piece of reasoning, all of which comes before the content."""
        ...

    def end(self, index: int, completion: Completion) -> bytes:
        """Events for what is known only when the turn is recorded; nothing else of this choice follows."""
        ...

    def close(self) -> bytes:
        """Events that end the stream, after all choices."""
        ...


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What one body asks for: a reply to each job, whole or streamed."""

    jobs: tuple[Job, ...]
    stream: bool
    replies: Replies


class ErrorForm(Protocol):
    """How a dialect says that a request failed."""

    def status(self, failure: Failure) -> int:
        """The HTTP status."""
        ...

    def body(self, failure: Failure) -> dict[str, Any]:
        """The error object."""
        ...

    def event(self, failure: Failure) -> bytes:
        """The event that ends a stream which had begun."""
        ...


class Tokens(Protocol):
    """What replies say of sampled tokens."""

    def text_of(self, token_ids: tuple[int, ...]) -> str:
        """Their text."""
        ...

    def is_stop(self, token_id: int) -> bool:
        """Whether the token ends generation and is not shown."""
        ...


class ModelNames(msgspec.Struct, frozen=True, kw_only=True):
    """``own`` always names the policy. ``served`` None: so does any other name, for there is one policy."""

    own: str = POLICY_NAME
    served: tuple[str, ...] | None = None

    def listed(self) -> tuple[str, ...]:
        """The names that a client is told."""
        return tuple(dict.fromkeys((self.own, *(self.served or ()))))

    def check(self, model: str) -> None:
        """Raises ``Failure`` (not found) for a model that is not served."""
        if not model:
            raise bad_request("model must not be empty", "model")
        if self.served is not None and model not in self.listed():
            names = ", ".join(self.listed())
            message = f"The model {model!r} does not exist here. Served: {names}."
            raise Failure(FailureKind.NOT_FOUND, message, param="model", code="model_not_found")


class Desk(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialect needs beside the body."""

    tokens: Tokens
    models: ModelNames
    ids: IdSource
    now_s: float


def decode_body(decoder: msgspec.json.Decoder[BodyT], data: bytes, unknown: Callable[[str], Failure]) -> BodyT:
    """The body, or why it is none.

    Args:
        unknown: what to say of a field that the dialect does not have.

    Raises:
        Failure: bad request.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        text = str(error)
        field = _UNKNOWN_FIELD.search(text)
        if field is not None:
            raise unknown(field["name"]) from error
        path = _PATH.search(text)
        raise bad_request(text, None if path is None else path["path"], "invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}") from error
    except RecursionError:
        raise bad_request("We could not parse the JSON body of your request: it is nested too deeply") from None


def refuse_given(**values: Any) -> None:
    """Refuse, by name, the first field that has a value. Raises ``Failure`` (bad request)."""
    for name, value in values.items():
        if value is not None:
            raise bad_request(f"{name} is not supported", name, "unsupported_parameter")


def shown_ids(turn: Turn | None, tokens: Tokens) -> tuple[int, ...]:
    """The sampled tokens without the stop token."""
    token_ids = () if turn is None else turn.token_ids
    return token_ids[:-1] if token_ids and tokens.is_stop(token_ids[-1]) else token_ids
