"""Running functions that we made ourselves, inside this process.

Only text built from templates and their mutants may come here; what an agent wrote runs in a sandbox.
Such text cannot do harm, but it can loop for ever, so each loop counts its rounds.
"""

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any

from steelyard.environments.repair.template import FUNCTION_NAME
from steelyard.types import CallResult, CallStatus

MAX_ROUNDS = 400
"""Rounds of all loops of one call together; templates need at most a few dozen."""

_TICK = "tick__"
_BUILTINS: dict[str, Any] = {
    builtin.__name__: builtin for builtin in (enumerate, len, max, min, range, sum, zip, sorted, abs)
}


class Runaway(Exception):
    """A call went round its loops more than :data:`MAX_ROUNDS` times."""


class _Rounds:
    """Counts the rounds of the present call."""

    def __init__(self) -> None:
        self.left = MAX_ROUNDS

    def tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Runaway


class _CountRounds(ast.NodeTransformer):
    def _counted(self, node: ast.For | ast.While) -> ast.AST:
        self.generic_visit(node)
        call = ast.Expr(ast.Call(func=ast.Name(id=_TICK, ctx=ast.Load()), args=[], keywords=[]))
        node.body.insert(0, call)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._counted(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._counted(node)


class KnownFunction:
    """A compiled function of ours.

    Args:
        lines: the whole function.

    Raises:
        SyntaxError: the lines are no Python.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        tree = ast.fix_missing_locations(_CountRounds().visit(ast.parse("\n".join(lines))))
        self._rounds = _Rounds()
        names: dict[str, Any] = {"__builtins__": _BUILTINS, _TICK: self._rounds.tick}
        exec(compile(tree, "<template>", "exec"), names)
        self._function: Callable[..., Any] = names[FUNCTION_NAME]

    def call(self, arguments: Sequence[Any]) -> CallResult:
        """One call; ``arguments`` (numbers, text, flat lists) are copied first."""
        self._rounds.left = MAX_ROUNDS
        copies = [list(argument) if isinstance(argument, list) else argument for argument in arguments]
        try:
            return CallResult(status=CallStatus.RETURNED, value=self._function(*copies))
        except Runaway:
            return CallResult(status=CallStatus.TIMED_OUT)
        except (ArithmeticError, LookupError, NameError, TypeError, ValueError, AttributeError) as error:
            return CallResult(status=CallStatus.RAISED, error=type(error).__name__)


@functools.lru_cache(maxsize=16_384)
def known_function(lines: tuple[str, ...]) -> KnownFunction:
    """The compiled function, cached by its text."""
    return KnownFunction(lines)


def run_known(lines: tuple[str, ...], inputs: Sequence[Sequence[Any]]) -> tuple[CallResult, ...]:
    """The results of a function of ours on each of ``inputs``."""
    function = known_function(lines)
    return tuple(function.call(arguments) for arguments in inputs)
