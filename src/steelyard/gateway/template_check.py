"""Plays conversations against a renderer, without a model, and says where turns do not extend each other.

The replies are in the template's own form, as a model that was trained on it would sample them.
"""

import itertools

import msgspec

from steelyard.errors import InputError
from steelyard.gateway.renderer import BreakReason, PreviousTurn, Prompt, Renderer
from steelyard.gateway.template_cases import TOOLS, Case, Step, cases, episode
from steelyard.gateway.template_traits import common_length
from steelyard.types import Message, Record, ToolCall, ToolSpec

_SHOWN_TOKENS = 12


class Break(Record, frozen=True, kw_only=True):
    """Where the prompt of turn ``turn`` (from 1) leaves the tokens so far: after ``position`` equal ones.

    ``before``: text of the tokens that stood there, ``after``: of those that stand there now.
    """

    turn: int
    reason: BreakReason
    position: int
    before: str
    after: str


class PlayedTurn(Record, frozen=True, kw_only=True):
    """A prompt and what was sampled for it. ``num_new``: how many of its tokens are of messages that were new."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    reply: Message
    broken: Break | None
    num_new: int
    num_computed: int


class CaseResult(Record, frozen=True, kw_only=True):
    """How a case went. ``refusal``: what the template said where it refused, in its prompt after ``num_turns``."""

    name: str
    num_turns: int
    num_segments: int
    num_malformed: int
    breaks: tuple[Break, ...]
    refusal: str | None


class Cost(Record, frozen=True, kw_only=True):
    """What the breaks of a typical episode cost, in tokens.

    ``num_computed``: prompt tokens that an engine computes which keeps what it computed before; ``num_again``: those
    of them that stand for what had been computed. ``num_trained``: tokens of all segments; ``num_once``: of one
    segment that would hold the same.
    """

    num_turns: int
    num_segments: int
    num_computed: int
    num_again: int
    num_trained: int
    num_once: int

    @property
    def again_frac(self) -> float:
        """Share of the computed prompt tokens that was computed before."""
        return self.num_again / self.num_computed

    @property
    def trained_ratio(self) -> float:
        """How many times the tokens of one segment are trained."""
        return self.num_trained / self.num_once


class Report(Record, frozen=True, kw_only=True):
    """All that is found out about a tokenizer and its template.

    ``after_end``: what the template writes after the token that ends a turn. ``is_parser_sure``: the parser reads the
    calls that the template writes. ``injections``: places where content became a control token, of
    ``num_injections_tried``.
    """

    model: str
    num_tokens: int
    control_texts: tuple[str, ...]
    end_of_turn: str
    after_end: str
    stop_texts: tuple[str, ...]
    shows_tools: bool
    writes_calls: bool
    calls_refusal: str | None
    takes_parallel_calls: bool
    tool_parser: str
    is_parser_sure: bool
    reasoning: tuple[str, str] | None
    asks_for_reasoning: bool
    cases: tuple[CaseResult, ...]
    injections: tuple[str, ...]
    num_injections_tried: int
    cost: Cost | None

    @property
    def is_whole(self) -> bool:
        """Whether every turn extends the one before it, and content stays content."""
        return not self.injections and not any(case.breaks for case in self.cases)


class Player:
    """Plays one case.

    Args:
        renderer: of the template to play with.
    """

    def __init__(self, renderer: Renderer, case: Case) -> None:
        self._renderer = renderer
        self._tools: tuple[ToolSpec, ...] = TOOLS if case.has_tools else ()
        system = () if case.system is None else (Message(role="system", content=case.system),)
        self._first = (*system, Message(role="user", content=case.user))
        self._reasons = asks_for_reasoning(renderer)
        self._numbers = itertools.count()
        self.turns: list[PlayedTurn] = []
        self.num_malformed = 0
        self._added: tuple[Message, ...] = ()

    def take(self, step: Step) -> PlayedTurn:
        """The next prompt, and the reply to it.

        Raises:
            InputError: the template refuses the messages.
        """
        prompt, broken = self._prompt()
        is_open = self._renderer.reader.is_open(prompt.text)
        token_ids = self._sample(step, prompt, is_open=is_open)
        shown = token_ids[:-1] if token_ids and token_ids[-1] in self._renderer.stop_token_ids else token_ids
        parsed = self._renderer.reader.read(
            self._renderer.codec.decode(shown), self._new_id, reads_calls=bool(self._tools), is_open=is_open
        )
        self.num_malformed += parsed.num_malformed
        reply = Message(
            role="assistant", content=parsed.content, tool_calls=parsed.tool_calls, reasoning=parsed.reasoning
        )
        num_new, num_computed = self._num_new(prompt, broken)
        turn = PlayedTurn(
            prompt=prompt, token_ids=token_ids, reply=reply, broken=broken, num_new=num_new, num_computed=num_computed
        )
        self.turns.append(turn)
        results = tuple(Message(role="tool", content=step.result, tool_call_id=call.id) for call in reply.tool_calls)
        user = step.user or (None if results else "Go on.")
        self._added = (*results, *(() if user is None else (Message(role="user", content=user),)))
        return turn

    def _prompt(self) -> tuple[Prompt, Break | None]:
        if not self.turns:
            return self._renderer.first_prompt(self._first, self._tools), None
        last = self.turns[-1]
        previous = PreviousTurn(prompt=last.prompt, token_ids=last.token_ids, reply=last.reply)
        extension = self._renderer.extend(previous, self._added, self._tools)
        if extension.break_reason is None:
            return extension.prompt, None
        known = (*last.prompt.token_ids, *last.token_ids)
        position = common_length(known, extension.prompt.token_ids)
        decode = self._renderer.codec.decode
        return extension.prompt, Break(
            turn=len(self.turns) + 1,
            reason=extension.break_reason,
            position=position,
            before=decode(known[position : position + _SHOWN_TOKENS]),
            after=decode(extension.prompt.token_ids[position : position + _SHOWN_TOKENS]),
        )

    def _num_new(self, prompt: Prompt, broken: Break | None) -> tuple[int, int]:
        """Tokens of the prompt that are of new messages, and those that an engine has to compute."""
        if not self.turns:
            return len(prompt.token_ids), len(prompt.token_ids)
        last = self.turns[-1]
        if broken is None:
            num_new = len(prompt.token_ids) - len(last.prompt.token_ids) - len(last.token_ids)
            return num_new, num_new
        until_reply = (*last.prompt.messages, last.reply)
        before = self._renderer.text_of(until_reply, self._tools)
        num_computed = len(prompt.token_ids) - broken.position
        num_new = len(prompt.token_ids) - len(self._renderer.codec.encode(self._renderer.codec.guard(before)))
        return min(max(num_new, 0), num_computed), num_computed

    def _sample(self, step: Step, prompt: Prompt, *, is_open: bool) -> tuple[int, ...]:
        """What a model would sample that says what the step says."""
        codec = self._renderer.codec
        calls = tuple(ToolCall(id=self._new_id(), name=name, arguments=text) for name, text in step.calls)
        said = Message(role="assistant", content=step.content or None, tool_calls=calls)
        text = self._written(prompt, said) if calls else step.content
        if step.content not in text:
            text = f"{step.content}\n{text}"
        if step.is_respaced:
            text = text.replace('": ', '" :   ')
        marks = self._renderer.reader.marks
        if marks is not None and self._reasons and (is_open or step.reasoning is not None):
            reasoning = step.reasoning or "I know this."
            opening = "" if is_open else f"{marks.opening}\n"
            text = f"{opening}{reasoning}\n{marks.closing}\n\n{text}"
        token_ids = tuple(codec.encode(text, is_start=False))
        if step.num_cut:
            return token_ids[: -step.num_cut]
        return (*token_ids, self._renderer.end_of_turn_id)

    def _written(self, prompt: Prompt, said: Message) -> str:
        """Calls as the template writes them, or, where it refuses, as the family's models do."""
        try:
            return self._renderer.written_reply(prompt, said)
        except InputError:
            parser = self._renderer.reader.parser
            return "" if parser is None else parser.write(said.tool_calls)

    def _new_id(self) -> str:
        return self._renderer.call_id(f"call_{next(self._numbers):016d}")


def asks_for_reasoning(renderer: Renderer) -> bool:
    """Whether the template knows reasoning, and its prompt does not end with reasoning that is over already."""
    marks = renderer.reader.marks
    text = renderer.first_prompt((Message(role="user", content="x"),), ()).text
    return marks is not None and not text.rstrip().endswith(marks.closing)


def check(renderer: Renderer, model: str) -> Report:
    """Find out all about a renderer.

    Args:
        model: what to call it.

    Raises:
        InputError: the template refuses the simplest conversation.
    """
    control_texts = tuple(token.text for token in renderer.codec.control_tokens)
    reasons = asks_for_reasoning(renderer)
    known = [case for case in cases(control_texts) if reasons or not case.needs_reasoning]
    results = tuple(play(renderer, case) for case in known)
    if results[0].refusal is not None:
        raise InputError(results[0].refusal)
    traits = renderer.traits
    injections, num_tried = find_injections(renderer)
    return Report(
        model=model,
        num_tokens=renderer.codec.num_ids,
        control_texts=control_texts,
        end_of_turn=renderer.codec.decode([renderer.end_of_turn_id]),
        after_end=_after_end(renderer),
        stop_texts=tuple(renderer.codec.decode([token_id]) for token_id in renderer.stop_token_ids),
        shows_tools=traits.shows_tools,
        writes_calls=traits.writes_calls,
        calls_refusal=traits.refusal,
        takes_parallel_calls=traits.takes_parallel_calls,
        tool_parser="" if renderer.reader.parser is None else renderer.reader.parser.name,
        is_parser_sure=renderer.reader.parser is not None and traits.written_parser == renderer.reader.parser.name,
        reasoning=traits.marks,
        asks_for_reasoning=reasons,
        cases=results,
        injections=injections,
        num_injections_tried=num_tried,
        cost=episode_cost(renderer),
    )


def play(renderer: Renderer, case: Case) -> CaseResult:
    """Play a case to its end, or until the template refuses."""
    player = Player(renderer, case)
    refusal = None
    try:
        for step in (*case.steps, Step(content="Done.")):
            player.take(step)
    except InputError as error:
        refusal = str(error)
    breaks = tuple(turn.broken for turn in player.turns if turn.broken is not None)
    return CaseResult(
        name=case.name,
        num_turns=len(player.turns),
        num_segments=len(breaks) + 1,
        num_malformed=player.num_malformed,
        breaks=breaks,
        refusal=refusal,
    )


def episode_cost(renderer: Renderer) -> Cost | None:
    """What a typical episode costs; None where the template refuses it."""
    case = episode()
    player = Player(renderer, case)
    try:
        for step in case.steps:
            player.take(step)
    except InputError:
        return None
    turns = player.turns
    last_of_segments = [
        turn for turn, after in zip(turns, [*turns[1:], None], strict=True) if after is None or after.broken is not None
    ]
    return Cost(
        num_turns=len(turns),
        num_segments=len(last_of_segments),
        num_computed=sum(turn.num_computed for turn in turns),
        num_again=sum(turn.num_computed - turn.num_new for turn in turns),
        num_trained=sum(len(turn.prompt.token_ids) + len(turn.token_ids) for turn in last_of_segments),
        num_once=sum(turn.num_new + len(turn.token_ids) for turn in turns),
    )


def find_injections(renderer: Renderer) -> tuple[tuple[str, ...], int]:
    """Put each control string, whole and cut in two, wherever content can stand.

    Returns:
        Where more control tokens came out than of harmless content, and how many places were tried.
    """
    control_ids = {token.token_id for token in renderer.codec.control_tokens}

    def num_control(text: str, place: str) -> int | None:
        try:
            prompt = renderer.first_prompt(_messages_with(renderer, text, place), _tools_with(text, place))
        except InputError:
            return None
        return sum(token_id in control_ids for token_id in prompt.token_ids)

    found: list[str] = []
    num_tried = 0
    for place in ("system message", "user message", "tool result", "call arguments", "tool description"):
        harmless = num_control("harmless", place)
        for control in (token.text for token in renderer.codec.control_tokens):
            for text in (control, f"x {control}{control} y", f" {control}\n"):
                number = num_control(text, place)
                num_tried += number is not None
                if number is not None and harmless is not None and number > harmless:
                    found.append(f"{control} in a {place}")
    return tuple(dict.fromkeys(found)), num_tried


def _messages_with(renderer: Renderer, text: str, place: str) -> tuple[Message, ...]:
    user = Message(role="user", content=text if place == "user message" else "x")
    if place == "system message":
        return (Message(role="system", content=text), user)
    if place not in ("tool result", "call arguments"):
        return (user,)
    arguments = {"path": text if place == "call arguments" else "x"}
    call = ToolCall(
        id=renderer.call_id("call_0000000000000000"),
        name="look",
        arguments=msgspec.json.encode(arguments).decode("utf-8"),
    )
    result = Message(role="tool", content=text if place == "tool result" else "x", tool_call_id=call.id)
    return (user, Message(role="assistant", tool_calls=(call,)), result)


def _tools_with(text: str, place: str) -> tuple[ToolSpec, ...]:
    return tuple(
        msgspec.structs.replace(tool, description=text) if place == "tool description" else tool for tool in TOOLS
    )


def _after_end(renderer: Renderer) -> str:
    """What stands between the end of an answer and the end of the conversation."""
    text = renderer.text_of((Message(role="user", content="x"), Message(role="assistant", content="y")), ())
    end = renderer.codec.decode([renderer.end_of_turn_id])
    return text.rpartition(end)[2]
