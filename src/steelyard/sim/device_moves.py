"""Devices on virtual time: in a role, on their way to one, without one, or dead. Each is in exactly one of these.

What is *desired* is the last plan. What is *wanted* is as much of it as live devices allow: it is what snapshots show.
Devices leave a role drained (a replica's open calls end, a step ends), and take up another one in the time that a
switch takes. A role that dies below its minimum is filled up from others.
"""

from collections.abc import Callable
from random import Random
from typing import Protocol

from msgspec.structs import replace

from steelyard.allocation.snapshot import Limits, Role, Split
from steelyard.errors import RunError
from steelyard.sim.faults import DeviceFailure, FailureRate, Faults
from steelyard.sim.kernel import Kernel

_MAX_FAILURES_A_DEVICE = 10
"""How often devices may die between two optimizer steps, on average: more often, and the run would never end."""


class Stage(Protocol):
    """A role's devices, as those who move them need it."""

    @property
    def num_devices(self) -> int:
        """Devices that it has, those that leave included."""
        ...

    def join(self, num_devices: int) -> None:
        """They are here, ready to work."""
        ...

    def leave(self, num_devices: int, on_gone: Callable[[int], None]) -> None:
        """Let go of so many once their work is done; ``on_gone`` is called with how many have gone, in parts."""
        ...

    def die(self, num_devices: int, rng: Random) -> tuple[int, int]:
        """So many die now, at most all. How many devices are gone with them, and how many of those were to leave."""
        ...


class DeviceMoves:
    """All devices of a run.

    Args:
        stages: by role.
        switch_s: what a device takes from one role to another.
        on_dead: called with a line for people when devices die or return.
    """

    def __init__(
        self,
        kernel: Kernel,
        num_devices: int,
        split: Split,
        limits: Limits,
        stages: dict[Role, Stage],
        switch_s: float,
        on_dead: Callable[[str], None],
    ) -> None:
        self._kernel = kernel
        self._num_devices = num_devices
        self._limits = limits
        self._stages = stages
        self._switch_s = switch_s
        self._on_dead = on_dead
        self._desired = self._wanted = split
        self._free = num_devices - split.total
        self._leaving = dict.fromkeys(Role, 0)
        self._arriving = dict.fromkeys(Role, 0)
        self._num_dead = self._num_returning = self._num_failures = 0
        self._role_s = dict.fromkeys(Role, 0.0)
        self._moving_s = self._dead_s = self._accounted_at_s = 0.0

    @property
    def split(self) -> Split:
        """Devices by role, moves under way counted as done."""
        return self._wanted

    @property
    def limits(self) -> Limits:
        """The limits over the devices that live."""
        least = self._limits.min_rollout + self._limits.min_train + self._limits.min_reward
        return replace(self._limits, total=max(least, self._num_devices - self._num_dead))

    @property
    def is_moving(self) -> bool:
        """Whether devices leave a role or are on their way to one."""
        return any(self._leaving.values()) or any(self._arriving.values())

    @property
    def num_moving(self) -> int:
        """Devices on their way from one role to another."""
        return sum(self._arriving.values())

    @property
    def num_known(self) -> int:
        """Devices in a role, on their way, without a role, or dead: always all of them."""
        return self._in_roles() + sum(self._arriving.values()) + self._free + self._num_dead

    def carry_out(self, split: Split) -> None:
        """Go over to another split. What dead devices lack comes on top once they return."""
        lacking = {role: self._desired.of(role) - self._wanted.of(role) for role in Role}
        whole = _with(split, {role: split.of(role) + lacking[role] for role in Role})
        self._desired = whole if self._limits.broken_by(whole) is None else split
        self._settle(None)

    # --- failures -------------------------------------------------------------------------------------

    def plan_faults(self, faults: Faults, rng: Random) -> None:
        """Have devices die when they are due to."""
        for failure in faults.failures:
            self._kernel.at(failure.at_s, lambda failure=failure: self._fail(failure, rng))  # type: ignore[misc]
        if faults.failure_rate is not None:
            self._plan_next(faults.failure_rate, rng)

    def step_done(self) -> None:
        """The run gets on, whatever dies."""
        self._num_failures = 0

    def _plan_next(self, rate: FailureRate, rng: Random) -> None:
        def due() -> None:
            # One of all devices is drawn; where it has no role nothing happens. So each dies at the same rate.
            drawn = rng.randrange(self._num_devices)
            for role, stage in self._stages.items():
                if drawn < stage.num_devices:
                    returns_after_s = rate.returns_after_s
                    self._fail(
                        DeviceFailure(at_s=self._kernel.now_s(), role=role, returns_after_s=returns_after_s), rng
                    )
                    break
                drawn -= stage.num_devices
            self._plan_next(rate, rng)

        self._kernel.after(rng.expovariate(self._num_devices / rate.mean_between_s), due)

    def _fail(self, failure: DeviceFailure, rng: Random) -> None:
        role = failure.role
        number = min(failure.num_devices, self._stages[role].num_devices)
        if number == 0:
            return
        self.account()
        num_gone, num_of_leaving = self._stages[role].die(number, rng)
        self._leaving[role] -= num_of_leaving
        self._num_dead += number
        self._free += num_gone - number
        self._num_failures += number
        if self._num_failures > _MAX_FAILURES_A_DEVICE * self._num_devices:
            raise RunError(
                f"devices must fail less often than the work can be done, but {self._num_failures} died since the "
                f"last optimizer step"
            )
        if failure.returns_after_s is not None:
            self._num_returning += number
            self._kernel.after(failure.returns_after_s, lambda: self._return(number))
        self._on_dead(f"{number} of {role} died at {self._kernel.now_s():.1f} s, {self._num_dead} are dead")
        self._settle(role)

    def _return(self, number: int) -> None:
        self.account()
        self._num_dead -= number
        self._num_returning -= number
        self._free += number
        self._on_dead(f"{number} returned at {self._kernel.now_s():.1f} s, {self._num_dead} are dead")
        self._settle(None)

    # --- moves ----------------------------------------------------------------------------------------

    def _settle(self, hit: Role | None) -> None:
        """Bring the devices nearer to what is desired. ``hit``: the role that has just lost some."""
        self.account()
        self._wanted = self._possible(hit)
        for role in Role:
            surplus = self._staying(role) + self._arriving[role] - self._wanted.of(role)
            if surplus > 0:
                self._release(role, min(surplus, self._staying(role)))
        for role in Role:
            lacking = self._wanted.of(role) - self._staying(role) - self._arriving[role]
            number = min(lacking, self._free) // self._unit(role) * self._unit(role)
            if number > 0:
                self._send(role, number)

    def _possible(self, hit: Role | None) -> Split:
        """What is desired, less what no live device is there for.

        The role that was hit gives first, then where no device is left idle, then who lacks most; none goes below its
        minimum while another can give.
        """
        alive, split = self._num_devices - self._num_dead, self._desired
        while split.total > alive:
            giving = [role for role in Role if split.of(role) - self._unit(role) >= self._least(role)]
            if not giving:
                if not self._num_returning:
                    raise RunError(
                        f"the roles must keep their minimums ({self._least(Role.ROLLOUT)} rollout, "
                        f"{self._least(Role.TRAIN)} train, {self._least(Role.REWARD)} reward), but {self._num_dead} of "
                        f"{self._num_devices} devices are dead and none returns"
                    )
                giving = [role for role in Role if split.of(role) >= self._unit(role)]
            lacking = {role: split.of(role) - self._staying(role) - self._arriving[role] for role in giving}
            fits = {role: self._unit(role) <= split.total - alive for role in giving}
            role = max(giving, key=lambda one: (lacking[one] > 0, one is hit, fits[one], lacking[one]))
            split = _with(split, {role: split.of(role) - self._unit(role)})
        return split

    def _release(self, role: Role, number: int) -> None:
        self._leaving[role] += number

        def gone(num_gone: int) -> None:
            self.account()
            self._leaving[role] -= num_gone
            self._free += num_gone
            self._settle(None)

        self._stages[role].leave(number, gone)

    def _send(self, role: Role, number: int) -> None:
        self._free -= number
        self._arriving[role] += number

        def arrive() -> None:
            self.account()
            self._arriving[role] -= number
            self._stages[role].join(number)
            self._settle(None)

        self._kernel.after(self._switch_s, arrive)

    def _staying(self, role: Role) -> int:
        return self._stages[role].num_devices - self._leaving[role]

    def _unit(self, role: Role) -> int:
        return self._desired.rollout_tp if role is Role.ROLLOUT else 1

    def _least(self, role: Role) -> int:
        limits = self._limits
        return {Role.ROLLOUT: limits.min_rollout, Role.TRAIN: limits.min_train, Role.REWARD: limits.min_reward}[role]

    def _in_roles(self) -> int:
        return sum(stage.num_devices for stage in self._stages.values())

    # --- device-seconds -------------------------------------------------------------------------------

    def account(self) -> None:
        """Count device-seconds up to now; called before anything changes."""
        elapsed_s = self._kernel.now_s() - self._accounted_at_s
        self._accounted_at_s = self._kernel.now_s()
        for role, stage in self._stages.items():
            self._role_s[role] += stage.num_devices * elapsed_s
        self._dead_s += self._num_dead * elapsed_s
        self._moving_s += (self._num_devices - self._num_dead - self._in_roles()) * elapsed_s

    def idle_fracs(self, busy_device_s: dict[Role, float]) -> dict[str, float]:
        """Share of each role's device-seconds without work; of all device-seconds, those on the way (``moving``,
        with those that have no role) and ``dead``."""
        self.account()
        idle = {
            str(role): max(0.0, 1.0 - busy_device_s[role] / held_s)
            for role, held_s in self._role_s.items()
            if held_s > 0.0
        }
        all_s = self._num_devices * self._kernel.now_s()
        idle["moving"] = self._moving_s / all_s if all_s else 0.0
        if self._dead_s:
            idle["dead"] = self._dead_s / all_s
        return idle


def _with(split: Split, counts: dict[Role, int]) -> Split:
    return replace(split, **{str(role): count for role, count in counts.items()})
