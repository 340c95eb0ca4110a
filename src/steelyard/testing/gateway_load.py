"""Scripted agents for a gateway under load: attempts of four calls, each extending the one before by a tool call."""

from dataclasses import dataclass

import msgspec

from steelyard.gateway.capability import KeyRing

TURNS_PER_ATTEMPT = 4
SECRET = b"benchmark".ljust(32, b".")
CALL = '<tool_call>{"name": "replace_line", "arguments": {"line": 3, "text": "return a - b"}}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.replace('_', ' ').capitalize()} of the file that is open.",
            "parameters": {
                "type": "object",
                "properties": {"line": {"type": "integer"}, "text": {"type": "string"}},
            },
        },
    }
    for name in ("replace_line", "insert_line", "show_lines")
]
SYSTEM = "Repair the function with the tools. Read the text of the task, call one tool at a time, then submit."
CALL_ID = b"CALL_ID_%d_"


@dataclass(frozen=True)
class Load:
    """``new_bytes``: of text that a call brings."""

    name: str
    new_bytes: int


class Agent:
    """One attempt: its calls, each to be made after the answer to the one before."""

    def __init__(self, key: str, bodies: list[bytes], path: str) -> None:
        self._key = key
        self._bodies = bodies
        self._path = path
        self._call_ids: list[bytes] = []

    def request(self) -> bytes | None:
        """The next call; None after the last."""
        turn = len(self._call_ids)
        if turn == TURNS_PER_ATTEMPT:
            return None
        body = self._bodies[turn]
        for index, call_id in enumerate(self._call_ids):
            body = body.replace(CALL_ID % index, call_id)
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def answered(self, answer: bytes) -> None:
        at = answer.find(b'"id":"call_')
        self._call_ids.append(answer[at + 6 : answer.index(b'"', at + 6)] if at >= 0 else b"none")


class Agents:
    """Makes attempts of one load, all of them new."""

    def __init__(self, load: Load, thinking: str, texts: list[str]) -> None:
        self._load = load
        self._thinking = thinking
        self._text = "".join(texts).encode("ascii", "ignore").decode()
        self._keys = KeyRing(SECRET)
        self._num_agents = 0
        self._position = 0
        self.num_bytes: list[int] = []

    def new(self, path: str) -> Agent:
        self._num_agents += 1
        key = self._keys.issue(f"att_{self._load.name}{self._num_agents}", 4e9)
        messages: list[object] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self._new_text()},
        ]
        bodies = []
        call = {"name": "replace_line", "arguments": '{"line": 3, "text": "return a - b"}'}
        for turn in range(TURNS_PER_ATTEMPT):
            bodies.append(msgspec.json.encode({"model": "policy", "messages": messages, "tools": TOOLS}))
            call_id = (CALL_ID % turn).decode()
            calls = [{"id": call_id, "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": self._thinking, "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": call_id, "content": self._new_text()})
        self.num_bytes += [len(body) for body in bodies]
        return Agent(key, bodies, path)

    def _new_text(self) -> str:
        size = self._load.new_bytes
        self._position = (self._position + size) % (len(self._text) - 2 * size)
        return self._text[self._position : self._position + size]
