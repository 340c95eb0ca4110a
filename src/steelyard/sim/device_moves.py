"""Devices on virtual time: in a role, on their way to one, without one, or dead. Each is in exactly one of these.

What is *desired* is the last plan. What is *wanted* is as much of it as live devices allow: it is what snapshots show.
Devices come and go in units: a rollout replica of some tensor-parallel size, or one device of another role. They leave
a role drained (a replica's open calls end, a step ends), and take up another one in the time that a switch takes. A
role that dies below its minimum is filled up from others. A replica that stays is not touched: of two multisets of
sizes only the difference moves, and never more than half of the pool at once, so that the rest can go on for it.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from steelyard.allocation.snapshot import Limits, ReplicaSize, Role, Split, split_of
from steelyard.errors import RunError
from steelyard.sim.faults import DeviceFailure, FailureRate, Faults
from steelyard.sim.kernel import Kernel

_MAX_FAILURES_A_DEVICE = 10
"""How often devices may die between two optimizer steps, on average: more often, and the run would never end."""


class Unit(NamedTuple):
    """What comes and goes as a whole: ``size`` devices of a role. 1, but for a rollout replica."""

    role: Role
    size: int


class Deaths(NamedTuple):
    """Devices that a stage has lost: how many are gone with them, and how many of those were to leave."""

    num_gone: int
    num_of_leaving: int


class Stage(Protocol):
    """A role's devices, as those who move them need it."""

    @property
    def num_devices(self) -> int:
        """Devices that it has, those that leave included."""
        ...

    def devices_by_size(self) -> Mapping[int, int]:
        """The same, by the size of the unit that they are in."""
        ...

    def join(self, num_devices: int, size: int) -> None:
        """They are here, ready to work, in units of ``size``."""
        ...

    def leave(self, num_devices: int, size: int, on_gone: Callable[[int], None], *, is_last: bool = False) -> None:
        """Let go of so many in units of ``size`` once their work is done; ``on_gone`` is called with how many have
        gone, in parts. ``is_last``: nobody stays to do the role's work, so it waits until others join."""
        ...

    def die(self, num_devices: int, rng: Random) -> dict[int, Deaths]:
        """So many die now, at most all. What is gone, by the size of its unit."""
        ...


class DeviceMoves:
    """All devices of a run.

    Args:
        stages: by role.
        switch_s: what a device takes from what it does to its place in a unit.
        on_dead: called with a line for people when devices die or return.
    """

    def __init__(
        self,
        kernel: Kernel,
        num_devices: int,
        split: Split,
        limits: Limits,
        stages: dict[Role, Stage],
        switch_s: Callable[[Unit], float],
        on_dead: Callable[[str], None],
    ) -> None:
        self._kernel = kernel
        self._num_devices = num_devices
        self._limits = limits
        self._stages = stages
        self._switch_s = switch_s
        self._on_dead = on_dead
        self._desired = self._wanted = units_of(split)
        self._rollout_tp = split.rollout_tp
        self._free = num_devices - split.total
        self._leaving = dict[Unit, int]()
        self._arriving = dict[Unit, int]()
        self._num_dead = self._num_returning = self._num_failures = 0
        self._role_s = dict.fromkeys(Role, 0.0)
        self._moving_s = self._dead_s = self._accounted_at_s = 0.0

    @property
    def split(self) -> Split:
        """Devices by role, moves under way counted as done."""
        return self._split_of(self._wanted)

    @property
    def units(self) -> Mapping[Unit, int]:
        """The same: devices in each kind of unit."""
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
        self._rollout_tp = split.rollout_tp
        asked = units_of(split)
        whole = dict(asked)
        for role in Role:
            _grow(whole, role, _devices(self._desired, role) - _devices(self._wanted, role))
        self._desired = whole if self._limits.broken_by(self._split_of(whole)) is None else asked
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
        deaths = self._stages[role].die(number, rng)
        for size, lost in deaths.items():
            self._leaving[Unit(role, size)] = self._leaving.get(Unit(role, size), 0) - lost.num_of_leaving
        self._num_dead += number
        self._free += sum(lost.num_gone for lost in deaths.values()) - number
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
        units = self._known_units()
        for unit in units:
            surplus = min(self._surplus(unit), self._staying(unit))
            number = min(surplus, self._may_go(unit))
            if number > 0:
                self._release(unit, number)
        for unit in units:
            lacking = -self._surplus(unit)
            number = min(lacking, self._free) // unit.size * unit.size
            if number > 0:
                self._send(unit, number)
        if not self.is_moving:
            self._make_way(units)

    def _known_units(self) -> list[Unit]:
        """All kinds that are there or wanted, by role, the largest first."""
        found = dict.fromkeys([*self._wanted, *(unit for unit, number in self._arriving.items() if number)])
        for role, stage in self._stages.items():
            found.update(dict.fromkeys(Unit(role, size) for size in stage.devices_by_size()))
        order = list(Role)
        return sorted(found, key=lambda unit: (order.index(unit.role), -unit.size))

    def _may_go(self, unit: Unit) -> int:
        """Devices of a kind that may leave now: a pool that changes its sizes keeps half of its devices at work, save
        those without which none of its new units can be made: they would stand idle one after the other."""
        units = self._known_units()
        if sum(one.role is unit.role for one in units) == 1:
            return self._staying(unit)
        staying = self._staying_in(unit.role)
        spare = (staying - -(-_devices(self._wanted, unit.role) // 2)) // unit.size
        needed = -(-self._needed(unit.role, units) // unit.size)
        return max(0, spare, needed) * unit.size

    def _needed(self, role: Role, units: list[Unit]) -> int:
        """Devices that a role must let go of itself for the smallest unit that it lacks."""
        lacking = [one.size for one in units if one.role is role and self._surplus(one) < 0]
        if not lacking or any(number for one, number in self._arriving.items() if one.role is role):
            return 0
        elsewhere = sum(self._surplus(one) for one in units if one.role is not role)
        return min(lacking) - elsewhere - self._free - sum(self._leaving.values())

    def _make_way(self, units: list[Unit]) -> None:
        """What is too large to leave within half of its pool leaves all the same where nothing else can happen."""
        for unit in units:
            if self._surplus(unit) > 0 and self._staying(unit) > 0:
                self._release(unit, unit.size)
                return

    def _possible(self, hit: Role | None) -> dict[Unit, int]:
        """What is desired, less what no live device is there for.

        The role that was hit gives first, then where no device is left idle, then who lacks most; none goes below its
        minimum while another can give.
        """
        alive, wanted = self._num_devices - self._num_dead, dict(self._desired)
        while (total := sum(wanted.values())) > alive:
            least = {unit: _devices(wanted, unit.role) - unit.size >= self._least(unit.role) for unit in wanted}
            giving = [unit for unit, number in wanted.items() if least[unit] and number >= unit.size]
            if not giving:
                if not self._num_returning:
                    raise RunError(
                        f"the roles must keep their minimums ({self._least(Role.ROLLOUT)} rollout, "
                        f"{self._least(Role.TRAIN)} train, {self._least(Role.REWARD)} reward), but {self._num_dead} of "
                        f"{self._num_devices} devices are dead and none returns"
                    )
                giving = [unit for unit, number in wanted.items() if number >= unit.size]
            lacking = {unit: wanted[unit] - self._staying(unit) - self._arriving.get(unit, 0) for unit in giving}
            fits = {unit: unit.size <= total - alive for unit in giving}
            chosen = max(giving, key=lambda one: (lacking[one] > 0, one.role is hit, fits[one], lacking[one]))
            wanted[chosen] -= chosen.size
        return wanted

    def _release(self, unit: Unit, number: int) -> None:
        is_coming = any(count for one, count in self._arriving.items() if one.role is unit.role)
        is_last = self._staying_in(unit.role) == number and not is_coming and _devices(self._wanted, unit.role) > 0
        self._leaving[unit] = self._leaving.get(unit, 0) + number

        def gone(num_gone: int) -> None:
            self.account()
            self._leaving[unit] -= num_gone
            self._free += num_gone
            self._settle(None)

        self._stages[unit.role].leave(number, unit.size, gone, is_last=is_last)

    def _send(self, unit: Unit, number: int) -> None:
        self._free -= number
        self._arriving[unit] = self._arriving.get(unit, 0) + number

        def arrive() -> None:
            self.account()
            self._arriving[unit] -= number
            self._stages[unit.role].join(number, unit.size)
            self._settle(None)

        self._kernel.after(self._switch_s(unit), arrive)

    def _split_of(self, units: Mapping[Unit, int]) -> Split:
        rollout = [one for one in units if one.role is Role.ROLLOUT]
        sizes = [ReplicaSize(tp=one.size, count=units[one] // one.size) for one in rollout]
        train, reward = (_devices(units, role) for role in (Role.TRAIN, Role.REWARD))
        return split_of(sizes, train, reward, self._rollout_tp)

    def _surplus(self, unit: Unit) -> int:
        return self._staying(unit) + self._arriving.get(unit, 0) - self._wanted.get(unit, 0)

    def _staying(self, unit: Unit) -> int:
        return self._stages[unit.role].devices_by_size().get(unit.size, 0) - self._leaving.get(unit, 0)

    def _staying_in(self, role: Role) -> int:
        return sum(self._staying(Unit(role, size)) for size in self._stages[role].devices_by_size())

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


def units_of(split: Split) -> dict[Unit, int]:
    """Devices in each kind of unit, by role, the largest first."""
    found = {Unit(Role.ROLLOUT, size.tp): size.tp * size.count for size in split.sizes}
    if not found:
        found = {Unit(Role.ROLLOUT, split.rollout_tp): 0}
    return {**found, Unit(Role.TRAIN, 1): split.train, Unit(Role.REWARD, 1): split.reward}


def _devices(units: Mapping[Unit, int], role: Role) -> int:
    return sum(number for unit, number in units.items() if unit.role is role)


def _grow(units: dict[Unit, int], role: Role, num_devices: int) -> None:
    """So many devices more, in units that are there already, the largest first."""
    for unit in sorted((one for one in units if one.role is role), key=lambda one: -one.size):
        number = num_devices // unit.size * unit.size
        units[unit] += number
        num_devices -= number
