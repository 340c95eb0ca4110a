"""The clients' view: whatever was acknowledged to a client must be in the journal, and nobody is told two things."""

from collections.abc import Iterable

from steelyard.coordinator import events as e
from steelyard.coordinator.groups import TaskStream
from steelyard.types import ArtifactReport, AttemptFailure, Lease, Manifest, Outcome, Purpose, Score, Trace

FAILURES = frozenset(
    {"DeadlineExceeded", "RemoteFailed", "StorageFailed", "deadline", "gateway_died", "orphaned", "worker_stopped"}
)
"""Why an attempt may fail here; another reason is an error of the worker, or something stored that was lost."""


class Witness:
    """Notes every acknowledgement when a client gets it. ``contradictions`` holds what is wrong already then."""

    def __init__(self) -> None:
        self.contradictions: list[str] = []
        self._leases: dict[str, tuple[str, Lease]] = {}
        self._started: set[str] = set()
        self._reports: dict[str, ArtifactReport] = {}
        self._failures: set[str] = set()
        self._scores: list[Score] = []
        self._sampled: dict[str, list[str]] = {}
        self._begun: dict[int, str] = {}
        self._published: dict[int, str] = {}
        self._checkpointed: dict[int, str] = {}

    def leased(self, worker_id: str, lease: Lease) -> None:
        """``worker_id`` was given a lease."""
        holder, before = self._leases.setdefault(lease.attempt_id, (worker_id, lease))
        if (holder, before.rollout_id, before.attempt_number) != (worker_id, lease.rollout_id, lease.attempt_number):
            self.contradictions.append(f"attempt {lease.attempt_id} was leased to {holder} and to {worker_id}")

    def started(self, attempt_id: str) -> None:
        """The start of an attempt was acknowledged."""
        self._started.add(attempt_id)

    def reported(self, report: ArtifactReport) -> None:
        """A report was acknowledged."""
        self._reports[report.attempt_id] = report

    def failed(self, failure: AttemptFailure) -> None:
        """A failure was acknowledged."""
        self._failures.add(failure.attempt_id)

    def sampled(self, attempt_id: str, request_id: str) -> None:
        """A model call was answered."""
        self._sampled.setdefault(attempt_id, []).append(request_id)

    def scored(self, score: Score) -> None:
        """A score was acknowledged."""
        self._scores.append(score)

    def knows(self, score: Score) -> bool:
        """Whether a verdict under this job was acknowledged."""
        return any(known.job_id == score.job_id and known.outcome is Outcome.SCORED for known in self._scores)

    def begun(self, step: int, batch_digest: str) -> None:
        """A step was acknowledged as begun; after a step was voided it may begin again with another batch."""
        self._begun[step] = batch_digest

    def published(self, manifest: Manifest) -> None:
        """A publication was acknowledged."""
        self._published[manifest.version] = manifest.weights_digest

    def checkpointed(self, step: int, digest: str) -> None:
        """A checkpoint was acknowledged."""
        self._checkpointed[step] = digest

    def broken(self, events: Iterable[e.AnyEvent], traces: dict[str, Trace], stream: TaskStream) -> list[str]:
        """What the journal does not hold although a client was told so, or holds otherwise."""
        journal = _Journal(events)
        lost = [*self.contradictions, *journal.out_of_order(stream)]
        for attempt_id, (worker_id, lease) in self._leases.items():
            found = journal.leases.get(attempt_id)
            wanted = (worker_id, lease.rollout_id, lease.attempt_number)
            if found != wanted:
                lost.append(f"the lease of {attempt_id} was given to {wanted}, the journal says {found}")
        lost += [f"the start of {a} was acknowledged and is lost" for a in sorted(self._started - journal.started)]
        lost += [
            f"the failure of {a} was acknowledged and is lost" for a in sorted(self._failures - journal.failed.keys())
        ]
        lost += [f"attempt {a} failed by {why}" for a, why in journal.failed.items() if why not in FAILURES]
        lost += self._lost_results(journal)
        for attempt_id, report in journal.reports.items():
            held = {turn.request_id for turn in traces[attempt_id].turns} if attempt_id in traces else set()
            missing = [name for name in self._sampled.get(attempt_id, ()) if name not in held]
            if missing and report is not None:
                lost.append(f"the trace of {attempt_id} lacks turns that its worker was answered: {missing}")
        return lost

    def _lost_results(self, journal: "_Journal") -> list[str]:
        lost = []
        for attempt_id, report in self._reports.items():
            if journal.reports.get(attempt_id) != report:
                lost.append(f"the report of {attempt_id} was acknowledged and is lost")
        for score in self._scores:
            if score.outcome is Outcome.SCORED and score not in journal.scores.get(score.attempt_id, ()):
                lost.append(f"the score of {score.attempt_id} by job {score.job_id} was acknowledged and is lost")
            elif score.outcome is not Outcome.SCORED and score.job_id not in journal.failed_jobs:
                lost.append(f"the failure of job {score.job_id} was acknowledged and is lost")
        for what, told, found in (
            ("step", self._begun, journal.begun),
            ("version", self._published, journal.published),
            ("checkpoint", self._checkpointed, journal.checkpointed),
        ):
            for number, digest in told.items():
                if digest not in found.get(number, ()):
                    lost.append(f"{what} {number} with {digest} was acknowledged, the journal has {found.get(number)}")
        return lost


class _Journal:
    """What the journal says, by plain bookkeeping."""

    def __init__(self, events: Iterable[e.AnyEvent]) -> None:
        self.leases: dict[str, tuple[str, str, int]] = {}
        self.started: set[str] = set()
        self.reports: dict[str, ArtifactReport] = {}
        self.failed: dict[str, str] = {}
        self.scores: dict[str, list[Score]] = {}
        self.failed_jobs: set[str] = set()
        self.begun: dict[int, list[str]] = {}
        self.published: dict[int, list[str]] = {}
        self.checkpointed: dict[int, list[str]] = {}
        self._admitted: list[e.GroupAdmitted] = []
        for event in events:
            self._note(event)

    def out_of_order(self, stream: TaskStream) -> list[str]:
        """Prompts that are not those of their places in the task stream."""
        wrong = []
        for group in self._admitted:
            task = stream.at(group.stream_position or 0)
            if task is None or task.task_id != group.task_id:
                wrong.append(f"{group.group_id} at position {group.stream_position} is about {group.task_id}")
        return wrong

    def _note(self, event: e.AnyEvent) -> None:
        match event:
            case e.GroupAdmitted() if event.purpose is Purpose.TRAIN:
                self._admitted.append(event)
            case e.Leased():
                self.leases[event.attempt_id] = (event.worker_id, event.rollout_id, event.attempt_number)
            case e.Running():
                self.started.add(event.attempt_id)
            case e.ArtifactReady():
                self.reports[event.report.attempt_id] = event.report
            case e.InfraFailed():
                self.failed[event.attempt_id] = event.reason
            case e.Scored():
                self.scores.setdefault(event.score.attempt_id, []).append(event.score)
            case e.GraderFailed():
                self.failed_jobs.add(event.job_id)
            case e.StepBegun():
                self.begun.setdefault(event.step, []).append(event.batch_digest)
            case e.VersionPublished():
                self.published.setdefault(event.version, []).append(event.weights_digest)
            case e.Checkpointed():
                self.checkpointed.setdefault(event.step, []).append(event.digest)
