"""The split with the shortest period, exactly: a search over the period, not over splits.

For a period ``T`` each role has a least number of devices that keeps it: scoring and training by their tables, the
pool by its knapsack at each pace (:mod:`steelyard.allocation.rollout_pools`). ``T`` can be kept if for some pace and
some smallest size they add up to no more devices than there are. That is monotone in ``T``: so the search halves. Which
pool at a pace needs fewest devices does not depend on the other roles, and what training may take, given the path at
that pace, depends on the pool only through the number of devices that load from the store: hence separable, and exact.
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from steelyard.allocation.rollout_pools import UNREACHABLE, PoolTable
from steelyard.allocation.snapshot import Limits, Split, split_of
from steelyard.allocation.stage_rates import NUM_PACES, Periods, StageRates
from steelyard.errors import InputError
from steelyard.types.record import Record

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PRECISION = 1e-9
_COARSE_HALVINGS, _FINE_HALVINGS = 7, 4
_MOST_TRIED = 12
"""Ways to share out devices that are left over."""


class Planned(Record, frozen=True, kw_only=True):
    """A split with what it achieves."""

    split: Split
    periods: Periods


class SplitSearch:
    """All splits of one model of rates within limits.

    Raises:
        InputError: no split can do the work; says what is lacking.
    """

    def __init__(self, rates: StageRates, limits: Limits) -> None:
        self._rates, self._limits = rates, limits
        self._total = min(limits.total, rates.num_devices)
        self._lag = rates.model.max_policy_lag
        has_model = rates.model.reward_model is not None
        self._least_reward = max(limits.min_reward, 1 if has_model else 0)
        self._train_s = rates.train_s[: self._total + 1]
        self._least_train = max(limits.min_train, rates.train_table.least_devices)
        self._most_train = min(self._total, self._total if limits.max_train is None else limits.max_train)
        self._least_rollout = max(limits.min_rollout, 1)
        self._most_rollout = min(self._total, self._total if limits.max_rollout is None else limits.max_rollout)
        self._check()
        self._make_lanes()

    def _check(self) -> None:
        need = self._least_train + max(self._least_rollout, self._rates.sizes[0]) + self._least_reward
        if need > self._total:
            raise InputError(
                f"devices must be >= {need} (train {self._least_train}, rollout "
                f"{max(self._least_rollout, self._rates.sizes[0])}, reward {self._least_reward}), got {self._total}"
            )
        if self._most_train < self._least_train:
            raise InputError(
                f"max_train must be >= {self._least_train}, with which a layout fits, got {self._most_train}"
            )

    def _make_lanes(self) -> None:
        rates, sizes = self._rates, self._rates.sizes
        values = np.stack([rates.by_size[tp].tokens_per_s for tp in sizes])
        lanes = [np.where(np.array(sizes)[:, None] < least, -np.inf, values) for least in sizes]
        # Without lag the whole frontier is asked for, else only single counts.
        least = self._least_rollout if self._lag else self._total
        self._pools = PoolTable(sizes, np.concatenate(lanes, axis=1), self._total, min(least, self._total))
        self._smallest = np.repeat(np.array(sizes, dtype=np.float64), NUM_PACES)
        self._paths_s = np.concatenate([rates.paths_s[tp] for tp in sizes])
        self._live_s = np.concatenate([rates.live_s(tp) for tp in sizes])
        self._swaps_s = np.repeat([rates.swap_s(tp) for tp in sizes], NUM_PACES)
        if not self._lag:
            self._make_frontier()

    def _make_frontier(self) -> None:
        """Without lag: seconds from weights that are READY to the next ones, but for the step, by devices, for each
        smallest size the best of all paces up to each."""
        counts = np.arange(self._total + 1, dtype=np.float64)
        with np.errstate(divide="ignore"):
            sampled_s = np.where(self._pools.exact > 0.0, self._rates.need_tokens / self._pools.exact, np.inf)
        windows_s = np.maximum(sampled_s, self._paths_s)
        windows_s[(counts < self._least_rollout) | (counts > self._most_rollout)] = np.inf
        self._frontiers = list[Floats]()
        for at, tp in enumerate(self._rates.sizes):
            ready_s = self._rates.ready_s(tp, counts)[:, None]
            window_s = windows_s[:, at * NUM_PACES : (at + 1) * NUM_PACES] + ready_s
            self._frontiers.append(np.minimum.accumulate(window_s, axis=1))

    def _windows(self, period_s: float) -> tuple[Floats, Ints]:
        """The best window of exactly so many devices, by devices, and the block of lanes that has it: at the paces that
        the limit on live attempts leaves within a period."""
        columns = list[Floats]()
        for at, frontier in enumerate(self._frontiers):
            live_s = self._live_s[at * NUM_PACES : (at + 1) * NUM_PACES]
            number = int(np.searchsorted(live_s, period_s, side="right"))
            columns.append(frontier[:, number - 1] if number else np.full(self._total + 1, np.inf))
        stacked = np.stack(columns)
        block = np.argmin(stacked, axis=0)
        return np.take_along_axis(stacked, block[None], axis=0)[0], block

    def _lane(self, num_devices: int, period_s: float, block: int) -> int:
        """The lane in a block whose window is the best of those that a period leaves."""
        lanes = slice(block * NUM_PACES, (block + 1) * NUM_PACES)
        number = int(np.searchsorted(self._live_s[lanes], period_s, side="right"))
        return block * NUM_PACES + int(np.argmin(self._frontiers[block][num_devices, :number]))

    # --- the search -----------------------------------------------------------------------------------

    def best(self) -> Planned:
        """The split with the shortest period; devices that do not shorten it go where they leave most slack.

        Raises:
            InputError: no period can be kept.
        """
        high = max(float(self._train_s[self._most_train]), self._rates.fixed_s, 1e-6)
        low = 0.0
        while self._keep(high) is None:
            low, high = high, high * 2.0
            if high > 1e15:
                raise InputError(f"no split of {self._total} devices can do the work within {self._limits}")
        low, high = self._halved(low, high, _COARSE_HALVINGS)
        while True:
            # A period is one of finitely many: when none shorter than that of a split can be kept, it is the shortest.
            found = self._found(high)
            least_s = min(one.periods.period_s for one in found)
            if self._keep(least_s * (1.0 - _PRECISION)) is None:
                best = [one for one in found if one.periods.period_s <= least_s * (1.0 + _PRECISION)]
                return min(best, key=lambda one: _strain(one.periods))
            low, high = self._halved(min(low, least_s), least_s * (1.0 - _PRECISION), _FINE_HALVINGS)

    def _halved(self, low: float, high: float, number: int) -> tuple[float, float]:
        """A period that cannot be kept, and one that can, nearer to each other."""
        for _ in range(number):
            middle = (low + high) / 2.0
            if self._keep(middle) is None:
                low = middle
            else:
                high = middle
        return low, high

    def _found(self, period_s: float) -> list[Planned]:
        """Splits that keep a period that can be kept."""
        kept = self._keep(period_s)
        assert kept is not None
        return [one for split in self._shared_out(period_s, *kept) if (one := self._planned(split)) is not None]

    def _keep(self, period_s: float) -> tuple[int, int, int, int] | None:
        """The fewest devices that keep a period: rollout, train, reward, and the lane of the pool. None: too many."""
        if period_s < self._rates.fixed_s:
            return None
        device_s = self._rates.reward_device_s
        reward = max(self._least_reward, math.ceil(device_s / period_s - 1e-12) if device_s else 0)
        found = self._keep_lagged(period_s) if self._lag else self._keep_synchronous(period_s, reward)
        if found is None or found[0] + found[1] + reward > self._total:
            return None
        rollout, train, lane = found
        return rollout, train, reward, lane

    def _keep_lagged(self, period_s: float) -> tuple[int, int, int] | None:
        rates = self._rates
        with np.errstate(divide="ignore"):
            worth = np.where(period_s > self._swaps_s, rates.need_tokens / (period_s - self._swaps_s), np.inf)
        devices = self._pools.least_devices(worth)
        ready_s, publish_s = self._published_s(devices)
        step_s = np.minimum(period_s, (self._lag + 1) * period_s - self._paths_s - ready_s)
        train = self._least_train_devices(step_s)
        is_open = (devices <= self._most_rollout) & (publish_s <= period_s) & (self._live_s <= period_s)
        total = np.where(is_open & (train <= self._most_train), devices + train, UNREACHABLE)
        lane = int(np.argmin(total))
        return None if total[lane] >= UNREACHABLE else (int(devices[lane]), int(train[lane]), lane)

    def _published_s(self, devices: Ints) -> tuple[Floats, Floats]:
        ready_s, publish_s = np.empty(len(devices)), np.empty(len(devices))
        counts = devices.astype(np.float64)
        for at, tp in enumerate(self._rates.sizes):
            block = slice(at * NUM_PACES, (at + 1) * NUM_PACES)
            ready_s[block] = self._rates.ready_s(tp, counts[block])
            publish_s[block] = self._rates.publish_s(tp, counts[block])
        return ready_s, publish_s

    def _keep_synchronous(self, period_s: float, reward: int) -> tuple[int, int, int] | None:
        train = np.arange(self._least_train, self._most_train + 1)
        windows_s, block = self._windows(period_s)
        least_s = np.minimum.accumulate(windows_s)
        rollout = np.searchsorted(-least_s, self._train_s[train] - period_s)
        total = np.where(rollout <= self._total, rollout + train, UNREACHABLE)
        at = int(np.argmin(total))
        if total[at] + reward > self._total:
            return None
        devices = int(rollout[at])
        return devices, int(train[at]), self._lane(devices, period_s, int(block[devices]))

    def _least_train_devices(self, step_s: Floats) -> Ints:
        """The fewest devices whose step takes no longer."""
        found = np.searchsorted(-self._train_s, -step_s, side="left")
        return np.maximum(self._least_train, found)

    # --- what is left over ----------------------------------------------------------------------------

    def _shared_out(self, period_s: float, rollout: int, train: int, reward: int, lane: int) -> Iterator[Split]:
        """The fewest devices of each role, and those that are left over in several ways."""
        spare = self._total - rollout - train - reward
        for share in dict.fromkeys(np.linspace(0, spare, min(spare, _MOST_TRIED) + 1).astype(int).tolist()):
            for also_reward in dict.fromkeys((0, (spare - share) // 4 if self._rates.reward_device_s else 0)):
                more_train = min(spare - share - also_reward, self._most_train - train)
                in_pool = min(rollout + share, self._most_rollout)
                if not self._lag:
                    windows_s, block = self._windows(period_s)
                    in_pool = int(np.argmin(windows_s[: in_pool + 1]))
                    lane = self._lane(in_pool, period_s, int(block[in_pool]))
                sizes = self._pools.pool(in_pool, lane)
                if sizes:
                    yield split_of(sizes, train + more_train, reward + also_reward)

    def _planned(self, split: Split) -> Planned | None:
        if self._limits.broken_by(split) is not None:
            return None
        return Planned(split=split, periods=self._rates.periods(split))


def _strain(periods: Periods) -> float:
    """How near all stages are to their limit together: of plans with one period, that with the most slack is best."""
    stages = (periods.rollout_s, periods.path_s, periods.train_s, periods.reward_s)
    return sum((stage_s / periods.period_s) ** 4 for stage_s in stages)
