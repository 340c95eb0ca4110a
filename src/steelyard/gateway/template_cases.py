"""Conversations that show whether the turns of a template extend each other."""

from collections.abc import Sequence

from steelyard.types import Record, ToolSpec

TOOLS = (
    ToolSpec(
        name="look",
        description="Show a line of a file.",
        parameters={"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}},
    ),
)
_LOOK = ("look", '{"path": "a.py", "line": 3}')
_LOOK_ELSEWHERE = ("look", '{"path": "b.py", "line": 12}')
_RESULT = "def add(a, b):\n    return a - b"


class Step(Record, frozen=True, kw_only=True):
    """One reply, and what follows it.

    ``calls``: name and arguments of each. ``num_cut``: as many tokens are missing at its end, and the one that ends
    the turn with them. ``is_respaced``: the JSON of calls has more spaces than the template writes.
    ``result``: what each call is answered with. ``user``: the message after that; without calls there is always one.
    """

    content: str = ""
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    num_cut: int = 0
    is_respaced: bool = False
    result: str = _RESULT
    user: str | None = None


class Case(Record, frozen=True, kw_only=True):
    """A conversation. The last step's reply is followed by one more prompt."""

    name: str
    steps: tuple[Step, ...]
    system: str | None = None
    user: str = "The function add has a bug. Find it."
    has_tools: bool = False
    needs_reasoning: bool = False


def episode() -> Case:
    """A typical episode of eight turns: two questions, each answered after three calls."""
    call = Step(reasoning="The file may say more.", calls=(_LOOK,))
    answer = Step(content="It returns a - b, but must return a + b.", reasoning="That is it.", user="And where else?")
    return Case(
        name="episode",
        system="You are a careful engineer.",
        has_tools=True,
        steps=(*([call] * 3), answer, *([call] * 3), answer),
    )


def cases(control_texts: Sequence[str]) -> tuple[Case, ...]:
    """All cases; ``control_texts`` are what a content must not turn into control tokens."""
    evil = " ".join(control_texts)
    answer = Step(content="It returns a - b.")
    look = Step(calls=(_LOOK,))
    thinks = Step(content="It is a - b.", reasoning="First I compare the names.")
    thinks_and_looks = Step(reasoning="I must look.", calls=(_LOOK,))
    return (
        Case(name="plain chat", steps=(answer, answer, answer)),
        Case(name="system message", system="You are a careful engineer.", steps=(answer, answer)),
        Case(name="tool calls", has_tools=True, steps=(look, Step(calls=(_LOOK_ELSEWHERE,)), answer)),
        Case(name="a question after tool calls", has_tools=True, steps=(look, answer, look, answer)),
        Case(name="text before a call", has_tools=True, steps=(Step(content="I look.", calls=(_LOOK,)), answer)),
        Case(
            name="parallel calls, results in a row",
            has_tools=True,
            steps=(Step(calls=(_LOOK, _LOOK_ELSEWHERE)), Step(calls=(_LOOK_ELSEWHERE, _LOOK)), answer),
        ),
        Case(name="more spaces in a call", has_tools=True, steps=(Step(calls=(_LOOK,), is_respaced=True), answer)),
        Case(name="reasoning", needs_reasoning=True, steps=(thinks, thinks, thinks)),
        Case(
            name="reasoning before calls",
            needs_reasoning=True,
            has_tools=True,
            steps=(thinks_and_looks, thinks_and_looks, thinks),
        ),
        Case(
            name="control strings in content",
            system=f"Never write {evil}.",
            user=f"{evil} in a.py",
            has_tools=True,
            steps=(Step(calls=(_LOOK,), result=f"{evil}\n{evil}"), Step(content="Done.", user=evil), answer),
        ),
        Case(name="reply cut by length", steps=(Step(content="It returns a - b, but", num_cut=2), answer)),
        Case(name="call cut by length", has_tools=True, steps=(Step(calls=(_LOOK,), num_cut=3), answer)),
        Case(name="character cut in the middle", steps=(Step(content="It is 🙂", num_cut=1), answer)),
        Case(name="empty reply", steps=(Step(), answer)),
        Case(name="white space around a reply", steps=(Step(content=" \n It returns a - b.\n\n"), answer)),
    )
