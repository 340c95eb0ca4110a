"""One trace as text for people: what the model saw and said, with versions, log-probabilities and mask."""

from collections.abc import Callable, Sequence

from steelyard.traces.open_traces import outline_of
from steelyard.traces.store import tokens_by_version
from steelyard.types import Trace, Turn

Decode = Callable[[Sequence[int]], str]

_SAMPLED = "+"
_MASKED = "."


def show_trace(trace: Trace, digest: str, decode: Decode, *, with_tokens: bool = False) -> str:
    """The whole trace as text, segment by segment; each prompt shows only what is new since the turn before.

    Args:
        decode: turns token ids into text, control tokens included.
        with_tokens: list every token of every segment on a line of its own: position, id, mask (``+`` sampled,
            ``.`` masked out of the loss), version, log-probability, log of the kept mass, text.
    """
    num_sampled = sum(len(turn.token_ids) for turn in trace.turns)
    lines = [
        f"attempt {trace.attempt_id}: {len(trace.turns)} turns, {num_sampled} sampled tokens,"
        f" ended as {trace.end_reason}, trace {digest}"
    ]
    newest: dict[int, Turn] = {}
    for turn in trace.turns:
        before = newest.get(turn.segment_index)
        if before is None:
            lines += ["", f"== segment {turn.segment_index} =="]
        lines += _turn_lines(turn, before, decode)
        newest[turn.segment_index] = turn
    if with_tokens:
        for index in sorted(newest):
            lines += ["", f"== tokens of segment {index} ==", *token_lines(trace, index, decode)]
    if trace.tools:
        lines += ["", "== tool calls =="]
        lines += [
            f"turn {tool.turn_index}: {tool.name} -> {tool.outcome} in {1e3 * tool.latency_s:.1f} ms"
            + ("" if tool.is_valid else " (not a valid call)")
            for tool in trace.tools
        ]
    return "\n".join(lines) + "\n"


def token_lines(trace: Trace, segment_index: int, decode: Decode) -> list[str]:
    """One line a token of the segment, up to its last sampled token."""
    lines: list[str] = []
    for turn in trace.turns:
        if turn.segment_index != segment_index:
            continue
        lines += [
            f"{position:6d} {token:7d} {_MASKED} {'':>5} {'':>9} {'':>8}  {decode((token,))!r}"
            for position, token in enumerate(turn.prompt_token_ids[len(lines) :], start=len(lines))
        ]
        versions = [version for version, count in tokens_by_version(outline_of(turn)) for _ in range(count)]
        rows = zip(turn.token_ids, turn.logprobs, turn.kept_logmass, versions, strict=True)
        lines += [
            f"{position:6d} {token:7d} {_SAMPLED} {version:5d} {logprob:9.4f} {kept:8.4f}  {decode((token,))!r}"
            for position, (token, logprob, kept, version) in enumerate(rows, start=len(lines))
        ]
    return lines


def _turn_lines(turn: Turn, before: Turn | None, decode: Decode) -> list[str]:
    num_known = 0 if before is None else len(before.prompt_token_ids) + len(before.token_ids)
    versions = ", ".join(f"v{version} x {count}" for version, count in tokens_by_version(outline_of(turn)))
    mean = sum(turn.logprobs) / len(turn.logprobs) if turn.logprobs else 0.0
    sampling = turn.sampling
    return [
        "",
        f"-- turn {turn.turn_index} ({turn.request_id}): {len(turn.prompt_token_ids)} prompt tokens"
        f" ({turn.num_cached_tokens} cached), {len(turn.token_ids)} sampled [{versions}],"
        f" mean log-probability {mean:.3f}, {turn.finish_reason},"
        f" {turn.ended_at_s - turn.started_at_s:.3f} s on {turn.replica_id}/{turn.load_id},"
        f" temperature {sampling.temperature:g}, top_p {sampling.top_p:g}",
        *_quoted(decode(turn.prompt_token_ids[num_known:]), _MASKED),
        *_quoted(decode(turn.token_ids), _SAMPLED),
    ]


def _quoted(text: str, mark: str) -> list[str]:
    return [f"{mark} {line}" for line in text.split("\n")]
