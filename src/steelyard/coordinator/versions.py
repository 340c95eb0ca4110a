"""Policy versions: published, proven, bound, released, deleted, orphaned."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from steelyard.coordinator import admission
from steelyard.coordinator import effects as fx
from steelyard.coordinator import events as e
from steelyard.coordinator.core import Core
from steelyard.coordinator.entities import Group, Version
from steelyard.coordinator.groups import Groups
from steelyard.coordinator.leases import Leases
from steelyard.coordinator.records import PendingStep, VersionInfo
from steelyard.coordinator.retry_rules import Ending
from steelyard.coordinator.transitions import VersionState
from steelyard.errors import DeadlineExceeded, IllegalTransition, RunError
from steelyard.types import LoadProof, Manifest, Purpose

_HELD = (VersionState.LOADED, VersionState.READY)


class Versions:
    """DESIGN section 4 from the coordinator's side. Files are somebody else's; references are kept here."""

    def __init__(self, core: Core, groups: Groups, leases: Leases) -> None:
        self._core = core
        self._groups = groups
        self._leases = leases
        self._reading: Counter[int] = Counter()
        core.subscribe(fx.AttemptEnded, lambda _: self.release())
        core.subscribe(fx.GroupChanged, self._on_group)
        core.subscribe(fx.VersionChanged, lambda _: core.progress.notify())

    def publish(self, manifest: Manifest) -> None:
        """A manifest is durable. Publishing the same again changes nothing.

        Raises:
            IllegalTransition: the number is used for other weights, or parent, step or number do not follow.
        """
        known = self._core.state.versions.get(manifest.version)
        if known is not None and (known.step, known.parent_version, known.weights_digest) == (
            manifest.step,
            manifest.parent_version,
            manifest.weights_digest,
        ):
            return
        self._core.record(
            e.VersionPublished(
                at_s=self._core.now_s(),
                version=manifest.version,
                step=manifest.step,
                parent_version=manifest.parent_version,
                weights_digest=manifest.weights_digest,
                model_config_digest=manifest.model_config_digest,
                tokenizer_digest=manifest.tokenizer_digest,
                template_digest=manifest.template_digest,
                num_bytes=sum(file.num_bytes for file in manifest.files),
                separates_parent=manifest.probe.separates_parent,
            )
        )

    def load(self, proof: LoadProof) -> None:
        """A replica proved what it holds. Idempotent while the version is LOADED or READY.

        Raises:
            IllegalTransition: the proof does not show the published weights, or the version is gone.
        """
        known = self._core.state.versions.get(proof.version)
        replica = self._core.state.replicas.get(proof.replica_id)
        is_held = replica is not None and proof.version in replica.held
        if known is not None and is_held and known.state in _HELD and proof in known.proofs:
            return
        self._core.record(e.VersionLoaded(at_s=self._core.now_s(), proof=proof))

    def make_ready(self, version: int) -> None:
        """Attempts may be bound to ``version`` from now on. Idempotent.

        Raises:
            IllegalTransition: no replica has proven it.
        """
        known = self._core.state.versions.get(version)
        if known is None or known.state is not VersionState.READY:
            self._core.record(e.VersionReady(at_s=self._core.now_s(), version=version))
        self._groups.admit()
        self.release()
        self._core.work.notify()

    def release(self) -> None:
        """Let go of versions that nobody samples from any more."""
        if self._core.is_finished:
            return
        for number in admission.releasable(self._core.state, frozenset(+self._reading)):
            self._core.record(e.VersionReleased(at_s=self._core.now_s(), version=number))

    def deletable(self) -> tuple[int, ...]:
        """Versions whose files nobody needs, oldest first."""
        references = admission.references(self._core.state, frozenset(+self._reading))
        gone = (VersionState.RELEASED, VersionState.ORPHANED)
        return tuple(n for n, who in references.items() if not who and self._core.state.versions[n].state in gone)

    def delete(self, version: int) -> None:
        """The files of ``version`` are about to be deleted. Delete them after this has returned, not before.

        Idempotent.

        Raises:
            IllegalTransition: somebody still needs them; names who.
        """
        known = self._core.state.versions.get(version)
        if known is not None and known.state is VersionState.DELETED:
            return
        if version not in self.deletable():
            references = admission.references(self._core.state, frozenset(+self._reading)).get(version)
            why = ", ".join(references) if references else "it is not RELEASED"
            raise IllegalTransition(f"VERSION_DELETED: version {version} must be free, but {why}")
        self._core.record(e.VersionDeleted(at_s=self._core.now_s(), version=version))

    def pin(self, version: int, label: str) -> None:
        """Keep the files of ``version`` for ``label``. Idempotent."""
        known = self._core.state.versions.get(version)
        if known is None or label not in known.labels:
            self._core.record(e.VersionPinned(at_s=self._core.now_s(), version=version, label=label))

    def unpin(self, version: int, label: str) -> None:
        """``label`` no longer needs ``version``. Idempotent."""
        known = self._core.state.versions.get(version)
        if known is None or label in known.labels:
            self._core.record(e.VersionUnpinned(at_s=self._core.now_s(), version=version, label=label))

    @contextlib.contextmanager
    def reading(self, version: int) -> Iterator[None]:
        """While open, the files of ``version`` are kept and the version is not released: a load is going on.

        Raises:
            IllegalTransition: the files are deleted already.
        """
        known = self._core.state.versions.get(version)
        if known is None or known.state is VersionState.DELETED:
            raise IllegalTransition(f"version {version} must be stored to be loaded, it is {known and known.state}")
        self._reading[version] += 1
        try:
            yield
        finally:
            self._reading[version] -= 1
            # Nothing else may happen that would look again. A run that has failed says so to everybody else.
            with contextlib.suppress(RunError):
                self._core.check()
                self.release()
            self._core.progress.notify()

    def orphan(self, version: int, reason: str) -> tuple[int, ...]:
        """Give up ``version`` and its descendants; returns them.

        Attempts on them end without using up budget, steps computed on them are voided, and groups that hold
        tokens of them start again as soon as the lag bound has room. Idempotent; a repetition also names descendants
        that had been given up before.

        Raises:
            IllegalTransition: the version is not on the surviving lineage, or a kept checkpoint holds it.
        """
        core, state = self._core, self._core.state
        known = state.versions.get(version)
        if known is not None and known.is_orphaned:
            return self._orphaned_with(known)
        if known is None or state.lineage.get(known.step) != version:
            raise IllegalTransition(f"VERSION_ORPHANED: version {version} must be on the surviving lineage")
        if known.step <= (state.checkpoints[0] if state.checkpoints else 0):
            raise IllegalTransition(f"VERSION_ORPHANED: version {version} is the start or held by a kept checkpoint")
        doomed = {v for step, v in state.lineage.items() if step >= known.step}
        self._end_attempts_on(doomed)
        for number in sorted(doomed, key=lambda v: state.versions[v].step, reverse=True):
            core.record(e.VersionOrphaned(at_s=core.now_s(), version=number, reason=reason))
        while (last := state.steps.get(state.next_step - 1)) is not None and last.parent_version in doomed:
            core.record(e.StepVoided(at_s=core.now_s(), step=last.step))
        for group in list(state.live_groups.values()):
            is_tainted = group.admitted_version in doomed or _sampled_from(group, doomed)
            if group.purpose is Purpose.TRAIN and is_tainted:
                self._groups.park(group, e.RestartReason.ORPHANED)
        self._groups.admit()
        return tuple(sorted(doomed))

    def pending_steps(self, checkpoint_step: int) -> tuple[PendingStep, ...]:
        """Steps to replay after loading the checkpoint of ``checkpoint_step`` (0: the starting weights).

        Raises:
            IllegalTransition: steps from there on are no longer remembered.
        """
        state = self._core.state
        steps = range(checkpoint_step, state.next_step)
        forgotten = [step for step in steps if step not in state.steps]
        if forgotten:
            raise IllegalTransition(
                f"steps from {checkpoint_step} on must be remembered, but those up to {forgotten[-1]} are covered "
                f"by the checkpoints of steps {state.checkpoints}"
            )
        return tuple(self._pending(step) for step in steps)

    def find(self, version: int) -> VersionInfo | None:
        """What is known of a version."""
        known = self._core.state.versions.get(version)
        return None if known is None else _info(known)

    def at_step(self, step: int) -> VersionInfo | None:
        """The surviving version after ``step`` optimizer steps."""
        number = self._core.state.lineage.get(step)
        return None if number is None else self.find(number)

    def newest_ready(self) -> VersionInfo | None:
        """The version that new attempts are bound to."""
        newest = self._core.state.newest_ready
        return None if newest is None else _info(newest)

    async def wait_for_room(self, deadline_s: float) -> None:
        """Return once one more version may be kept.

        Raises:
            DeadlineExceeded: names each kept version and who needs it.
        """
        started_s = self._core.now_s()
        limit = self._core.settings.max_retained_versions
        while True:
            self._core.check()
            references = admission.references(self._core.state, frozenset(+self._reading))
            if len(references) < limit:
                return
            waited_s = self._core.now_s() - started_s
            if waited_s >= deadline_s:
                culprits = tuple(f"version {n}: {', '.join(who) or 'to be deleted'}" for n, who in references.items())
                what = f"fewer than weights.max_retained_versions = {limit} versions"
                raise DeadlineExceeded(what, culprits, waited_s)
            await self._core.wait(self._core.progress, started_s + deadline_s)

    def _orphaned_with(self, first: Version) -> tuple[int, ...]:
        """An orphaned version and its descendants, which are orphaned too."""
        family = {first.version}
        for number, version in sorted(self._core.state.versions.items()):
            if version.parent_version in family and version.is_orphaned:
                family.add(number)
        return tuple(sorted(family))

    def _pending(self, number: int) -> PendingStep:
        step = self._core.state.steps[number]
        published = self.at_step(number + 1)
        return PendingStep(
            step=number,
            parent_version=step.parent_version,
            group_ids=step.group_ids,
            sample_ids=step.sample_ids,
            batch_digest=step.batch_digest,
            published_version=published.version if published else None,
            published_digest=published.weights_digest if published else None,
        )

    def _end_attempts_on(self, doomed: set[int]) -> None:
        for group in list(self._core.state.live_groups.values()):
            if group.bound_version in doomed:
                self._groups.drop(group, e.DropReason.CANCELLED)
        follows = self._core.settings.rules.follows_updates
        for rollout in list(self._core.state.held()):
            # Which later versions sampled for an attempt that follows updates is not known before its end.
            may_hold = follows and rollout.group.purpose is Purpose.TRAIN
            if may_hold or rollout.policy_version in doomed:
                self._leases.fail(rollout, Ending.ABANDONED, "orphaned")

    def _on_group(self, _: fx.GroupChanged) -> None:
        self.release()
        self._core.progress.notify()


def _sampled_from(group: Group, versions: set[int]) -> bool:
    traces = [rollout.report.trace for rollout in group.rollouts if rollout.report is not None]
    return any(trace.oldest_version in versions or trace.newest_version in versions for trace in traces)


def _info(version: Version) -> VersionInfo:
    return VersionInfo(
        version=version.version,
        step=version.step,
        parent_version=version.parent_version,
        weights_digest=version.weights_digest,
        state=version.state.value,
        num_live=version.num_live,
    )
