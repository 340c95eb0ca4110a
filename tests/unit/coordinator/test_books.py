"""Books: they close, and they do not close when something is missing."""

from steelyard.coordinator.books import Books, prompt_book, token_book
from steelyard.testing.run_rig import WORKER, RunRig, play


def test_every_token_is_in_exactly_one_place() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.train(0)
        lost, held, sealed = await rig.coordinator.lease(WORKER, 3, 0.0)
        await rig.lose(lost, 7)
        rig.stores.record(held.attempt_id, 5)
        report = rig.seal(sealed)
        await rig.coordinator.artifact_ready(report)
        tokens = (await rig.coordinator.books(rig.stores.recorded)).tokens
        waiting = sum(
            r.sealed_tokens for g in rig.coordinator.state.live_groups.values() for r in g.rollouts if r.report
        )
        assert tokens.lost == {"sandbox_died": 7}
        assert tokens.in_flight == waiting + 5
        assert tokens.in_flight_sealed == waiting >= report.trace.num_tokens
        assert tokens.trained == sum(
            r.sealed_tokens
            for g in rig.coordinator.state.groups.values()
            if g.state == "CONSUMED"
            for r in g.accepted()
        )
        assert tokens.gap == 0

    play(scene)


def test_a_token_that_only_the_recorder_knows_opens_the_book() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.rollouts()
        book = token_book(rig.coordinator.state, {**rig.stores.recorded, "att_nobody": 4})
        assert book.gap == 4
        less = dict(rig.stores.recorded)
        less[next(iter(less))] -= 1
        assert token_book(rig.coordinator.state, less).gap == -1
        assert not Books(prompts=prompt_book(rig.coordinator.state), tokens=book).are_closed

    play(scene)


def test_a_group_that_vanishes_opens_the_prompt_book() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.train(0)
        book = prompt_book(rig.coordinator.state)
        assert (book.issued, book.trained, book.live, book.gap) == (6, 2, 4, 0)
        live = next(name for name, group in rig.coordinator.state.groups.items() if group.state != "CONSUMED")
        kept = rig.coordinator.state.groups.pop(live)
        assert prompt_book(rig.coordinator.state).gap == 1
        rig.coordinator.state.groups[live] = kept

    play(scene)
