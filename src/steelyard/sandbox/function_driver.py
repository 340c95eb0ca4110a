"""Inside the sandbox: calls a function of an untrusted source on inputs and writes what it returned, as data.

Standard library only; mounted beside ``inside.py`` and run in the child of one run, together with the code
that it calls. So nothing that it writes is evidence: a line says "my answer to input i is this", however it
came about, and only someone outside who knows the right answers can judge it. There are no right answers here.

Data are None, bool, int, float, str, list, tuple and dict (those exact types) as JSON; what JSON lacks is
tagged: ``{"t": [...]}`` a tuple, ``{"d": [[key, value], ...]}`` a dict, ``{"i": "0x..."}`` a large int.
"""

import json
import os
import sys
from typing import Any

PROGRAM = b"import function_driver\nfunction_driver.main()\n"

RETURNED, RAISED, UNLOADABLE = "returned", "raised", "unloadable"
_EXACT_INT = 1 << 53
_MAX_ERROR_CHARS = 300


def to_json(value: Any) -> Any:
    """The JSON form of ``value``.

    Raises:
        TypeError: a part of it has another type than those named above (a subclass is another type).
        RecursionError: it is nested too deeply, or contains itself.
    """
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -_EXACT_INT < value < _EXACT_INT else {"i": hex(value)}
    if kind is list:
        return [to_json(item) for item in value]
    if kind is tuple:
        return {"t": [to_json(item) for item in value]}
    if kind is dict:
        return {"d": [[to_json(key), to_json(item)] for key, item in value.items()]}
    raise TypeError(f"a value must be None, bool, int, float, str, list, tuple or dict, got {kind.__name__}")


def from_json(form: Any) -> Any:
    """The value whose JSON form is ``form``. Safe on hostile forms.

    Raises:
        ValueError: ``form`` is not one that :func:`to_json` makes.
        RecursionError: it is nested too deeply.
    """
    if isinstance(form, list):
        return [from_json(item) for item in form]
    if not isinstance(form, dict):
        return form
    if len(form) == 1:
        ((tag, body),) = form.items()
        if tag == "t" and isinstance(body, list):
            return tuple(from_json(item) for item in body)
        if tag == "i" and isinstance(body, str):
            return int(body, 16)
        if tag == "d" and isinstance(body, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in body):
            return _dict_from(body)
    raise ValueError(f"an object must be one tag of t, d, i with its body, got keys {sorted(form)[:4]}")


def _dict_from(pairs: list[list[Any]]) -> dict[Any, Any]:
    try:
        return {from_json(key): from_json(item) for key, item in pairs}
    except TypeError as error:
        raise ValueError(f"a key of a dict must be hashable: {error}") from error


def main() -> None:
    """Read one job from stdin, write one line a call: ``[index, status, value or error]``."""
    job = json.loads(sys.stdin.buffer.read())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # What the function prints is nobody's answer.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    namespace: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(job["source"], "<answer>", "exec"), namespace)
        function = namespace[job["function"]]
    except MemoryError:
        raise
    except KeyError:
        answers.write(_line(0, UNLOADABLE, f"NameError: the source must define {job['function']!r}"))
        return
    except Exception as error:  # noqa: BLE001  whatever a source raises is its answer
        answers.write(_line(0, UNLOADABLE, describe(error)))
        return
    for index, arguments in enumerate(job["inputs"]):
        answers.write(_call(index, function, from_json(arguments)))


def _call(index: int, function: Any, arguments: list[Any]) -> str:
    try:
        return _line(index, RETURNED, to_json(function(*arguments)))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a function raises is its answer
        return _line(index, RAISED, describe(error))


def _line(index: int, status: str, body: Any) -> str:
    return json.dumps([index, status, body]) + "\n"


def describe(error: BaseException) -> str:
    """One line: the type, the message and the last line number inside the source, as far as they can be had."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  the error is the program's own class
        message = "?"
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<answer>":
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        message, line = error.msg, error.lineno
    where = f" (line {line})" if line is not None else ""
    return f"{type(error).__name__}: {message}"[:_MAX_ERROR_CHARS] + where
