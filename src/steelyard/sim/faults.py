"""What goes wrong in a scenario: tools that stand still or slow down, devices that die and come back or not."""

from steelyard.allocation.snapshot import Role
from steelyard.errors import InputError
from steelyard.types.record import Record


class ToolOutage(Record, frozen=True, kw_only=True):
    """From ``begins_s`` on, for ``lasts_s``, all tools take ``slowdown`` times as long; None: they stand still.

    A call that is under way is hit like one that begins: what is left of it takes longer, or waits for the end.
    """

    begins_s: float
    lasts_s: float
    slowdown: float | None = None

    def __post_init__(self) -> None:
        _check_time("outages.begins_s", self.begins_s, least=0.0)
        if not 0.0 < self.lasts_s < float("inf"):
            raise InputError(f"outages.lasts_s must be finite and > 0, got {self.lasts_s}")
        if self.slowdown is not None and not 1.0 <= self.slowdown < float("inf"):
            raise InputError(
                f"outages.slowdown must be finite and >= 1, or null for tools that stand still, got {self.slowdown}"
            )


class DeviceFailure(Record, frozen=True, kw_only=True):
    """At ``at_s`` ``num_devices`` of ``role`` die, those of one replica together; fewer where the role has fewer.

    ``returns_after_s``: until they are there again, empty; None: never.
    """

    at_s: float
    role: Role
    num_devices: int = 1
    returns_after_s: float | None = None

    def __post_init__(self) -> None:
        _check_time("failures.at_s", self.at_s, least=0.0)
        if self.num_devices < 1:
            raise InputError(f"failures.num_devices must be >= 1, got {self.num_devices}")
        if self.returns_after_s is not None:
            _check_time("failures.returns_after_s", self.returns_after_s, least=0.0)


class FailureRate(Record, frozen=True, kw_only=True):
    """Each device that has a role dies once in ``mean_between_s`` on average, independently of its age."""

    mean_between_s: float
    returns_after_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.mean_between_s < float("inf"):
            raise InputError(f"failure_rate.mean_between_s must be finite and > 0, got {self.mean_between_s}")
        if self.returns_after_s is not None:
            _check_time("failure_rate.returns_after_s", self.returns_after_s, least=0.0)


class Faults(Record, frozen=True, kw_only=True):
    """All of a scenario. Outages follow each other without overlap.

    Raises:
        InputError: two outages overlap; names them.
    """

    outages: tuple[ToolOutage, ...] = ()
    failures: tuple[DeviceFailure, ...] = ()
    failure_rate: FailureRate | None = None

    def __post_init__(self) -> None:
        for index, (one, following) in enumerate(zip(self.outages, self.outages[1:], strict=False)):
            if following.begins_s < one.begins_s + one.lasts_s:
                raise InputError(
                    f"outages[{index + 1}].begins_s must be >= {one.begins_s + one.lasts_s}, the end of the one "
                    f"before, got {following.begins_s}"
                )

    def tool_ends_s(self, begins_s: float, work_s: float) -> float:
        """When a tool call ends that begins at ``begins_s`` and takes ``work_s`` where nothing goes wrong."""
        at_s, left_s = begins_s, work_s
        for outage in self.outages:
            ends_s = outage.begins_s + outage.lasts_s
            if ends_s <= at_s:
                continue
            before_s = max(0.0, outage.begins_s - at_s)
            if left_s <= before_s:
                break
            at_s, left_s = at_s + before_s, left_s - before_s
            if outage.slowdown is not None:
                if left_s * outage.slowdown <= ends_s - at_s:
                    return at_s + left_s * outage.slowdown
                left_s -= (ends_s - at_s) / outage.slowdown
            at_s = ends_s
        return at_s + left_s


def _check_time(field: str, value: float, least: float) -> None:
    if not least <= value < float("inf"):
        raise InputError(f"{field} must be finite and >= {least:g}, got {value}")
