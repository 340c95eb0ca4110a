"""The two books of a run, DESIGN section 3. They must close at any instant and after any crash.

Prompts, in groups:  ``issued = trained + dropped(by reason) + live``.
Tokens, sampled:     ``recorded = trained + evaluated + rejected(by reason) + in flight + lost(by reason)``.

The left sides come from elsewhere than the right ones: ``issued`` from the frontier of the task stream, ``recorded``
from the recorder's own ledger.
"""

from collections.abc import Mapping

from steelyard.coordinator.entities import State
from steelyard.coordinator.transitions import HELD, GroupState, RolloutState
from steelyard.types import Purpose, Record

_SEALED = frozenset({RolloutState.ARTIFACT_READY, RolloutState.SCORED, RolloutState.ACCEPTED})


class PromptBook(Record, frozen=True, kw_only=True):
    """Groups of the training stream. ``live``: admitted and neither trained nor dropped."""

    issued: int
    trained: int
    dropped: dict[str, int]
    live: int

    @property
    def gap(self) -> int:
        """0 where the book closes."""
        return self.issued - self.trained - sum(self.dropped.values()) - self.live


class TokenBook(Record, frozen=True, kw_only=True):
    """Sampled tokens. ``in_flight``: sealed and not yet consumed (``in_flight_sealed`` of them), or with a worker."""

    recorded: int
    trained: int
    evaluated: int
    rejected: dict[str, int]
    lost: dict[str, int]
    in_flight: int
    in_flight_sealed: int

    @property
    def gap(self) -> int:
        """0 where the book closes."""
        booked = self.trained + self.evaluated + sum(self.rejected.values()) + sum(self.lost.values())
        return self.recorded - booked - self.in_flight


class Books(Record, frozen=True, kw_only=True):
    """Both books at one instant."""

    prompts: PromptBook
    tokens: TokenBook

    @property
    def are_closed(self) -> bool:
        """Whether both close."""
        return self.prompts.gap == 0 and self.tokens.gap == 0


def prompt_book(state: State) -> PromptBook:
    """The prompt book: ``issued`` is the stream's frontier, ``live`` is counted over the groups that are held."""
    live = sum(
        group.purpose is Purpose.TRAIN and group.state in (GroupState.OPEN, GroupState.COMPLETE, GroupState.PARKED)
        for group in state.groups.values()
    )
    return PromptBook(
        issued=state.next_position,
        trained=state.prompts.trained,
        dropped={reason.value: count for reason, count in state.prompts.dropped.items() if count},
        live=live,
    )


def token_book(state: State, recorded: Mapping[str, int]) -> TokenBook:
    """The token book.

    Args:
        state: live or replayed.
        recorded: sampled tokens by attempt, as the recorder's ledger counted them.
    """
    sealed = 0
    open_tokens = 0
    for group in state.live_groups.values():
        for rollout in group.rollouts:
            if rollout.state in _SEALED:
                sealed += rollout.sealed_tokens
            elif rollout.state in HELD and rollout.attempt_id is not None:
                open_tokens += recorded.get(rollout.attempt_id, 0)
    return TokenBook(
        recorded=sum(recorded.values()),
        trained=state.tokens.trained,
        evaluated=state.tokens.evaluated,
        rejected={reason: count for reason, count in state.tokens.rejected.items() if count},
        lost={reason: count for reason, count in state.tokens.lost.items() if count},
        in_flight=sealed + open_tokens,
        in_flight_sealed=sealed,
    )


def books(state: State, recorded: Mapping[str, int]) -> Books:
    """Both books."""
    return Books(prompts=prompt_book(state), tokens=token_book(state, recorded))
