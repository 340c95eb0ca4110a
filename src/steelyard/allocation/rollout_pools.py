"""The best multiset of replicas for a number of devices: an unbounded knapsack, exact, whatever the number.

Replicas of size ``t`` are worth ``v_t`` each; ``n`` devices are to be worth as much as possible. Beyond a few devices
the answer is periodic (Gilmore, Gomory: The Theory and Computation of Knapsack Functions, 1966): with ``t*`` the size
that is worth the most a device, a best multiset has fewer than ``t*`` replicas of other sizes, for among any ``t*`` of
them some add up to a multiple of ``t*`` devices and can be exchanged. So rows up to the square of the largest size
suffice, and planning time does not grow with the number of devices.

Many problems are solved at once: *lanes*, one for each pace and least size that a planner looks at.
"""

import numpy as np
import numpy.typing as npt

from steelyard.allocation.snapshot import ReplicaSize

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

UNREACHABLE = np.iinfo(np.int64).max // 4
"""More devices than there are anywhere."""


class PoolTable:
    """Worth of the best pool of exactly so many devices.

    Args:
        sizes: devices of a replica, in rising order.
        values: worth of one replica, by size and lane; minus infinity where a lane may not use the size.
        most: devices that will be asked for at most.
        least: devices that a pool must have at least.
    """

    def __init__(self, sizes: tuple[int, ...], values: Floats, most: int, least: int = 0) -> None:
        self._sizes, self._values = sizes, values
        self._best = np.argmax(values / np.array(sizes, dtype=np.float64)[:, None], axis=0)
        self._steps = np.array(sizes, dtype=np.int64)[self._best]
        self._gains = np.take_along_axis(values, self._best[None], axis=0)[0]
        self.top = min(most, max(sizes[-1] ** 2, least) + sizes[-1])
        self.exact = self._rows()
        allowed = np.where(np.arange(self.top + 1)[:, None] < least, -np.inf, self.exact)
        self._reached = np.maximum.accumulate(allowed, axis=0)
        self._num_lanes = values.shape[1]

    def _rows(self) -> Floats:
        rows = np.full((self.top + 1, self._values.shape[1]), -np.inf)
        rows[0] = 0.0
        for num_devices in range(1, self.top + 1):
            row = rows[num_devices]
            for size, value in zip(self._sizes, self._values, strict=True):
                if size <= num_devices:
                    np.maximum(row, rows[num_devices - size] + value, out=row)
        return rows

    def least_devices(self, worth: Floats) -> Ints:
        """The least number of devices, for each lane, whose best pool is worth so much; :data:`UNREACHABLE`: none.

        Args:
            worth: by lane.
        """
        found: Ints = (self._reached < worth).sum(axis=0, dtype=np.int64)
        beyond = found > self.top
        if beyond.any():
            found[beyond] = self._beyond(worth, np.flatnonzero(beyond))
        return found

    def _beyond(self, worth: Floats, lanes: Ints) -> Ints:
        """The same where the table's rows do not reach: for each residue, as many of the best size as it takes."""
        steps, gains = self._steps[lanes], self._gains[lanes]
        least = np.full(len(lanes), UNREACHABLE, dtype=np.int64)
        for back in range(min(self._sizes[-1], self.top + 1)):
            start = self.exact[self.top - back, lanes]
            is_open = (back < steps) & np.isfinite(start) & (gains > 0.0) & np.isfinite(worth[lanes])
            with np.errstate(divide="ignore", invalid="ignore"):
                number = np.where(is_open, np.ceil((worth[lanes] - start) / gains), 0.0)
            number = np.clip(number, 0.0, 1e12)
            needed = self.top - back + number.astype(np.int64) * steps
            least = np.where(is_open, np.minimum(least, needed), least)
        return least

    def worth(self, num_devices: int, lane: int) -> float:
        """Of the best pool of exactly so many devices; minus infinity where no replicas add up to them."""
        number = max(0, -(-(num_devices - self.top) // int(self._steps[lane])))
        row = num_devices - number * int(self._steps[lane])
        return float(self.exact[row, lane] + (number * self._gains[lane] if number else 0.0))

    def pool(self, num_devices: int, lane: int) -> tuple[ReplicaSize, ...]:
        """A best pool of at most so many devices for one lane, largest replicas first; the most devices that add up."""
        step = int(self._steps[lane])
        counts = dict.fromkeys(self._sizes, 0)
        number = max(0, -(-(num_devices - self.top) // step))
        counts[step] += number
        left = num_devices - number * step
        while left > 0 and not np.isfinite(self.exact[left, lane]):
            left -= 1
        while left > 0:
            wanted = self.exact[left, lane]
            fitting = [at for at, size in enumerate(self._sizes) if size <= left]
            made = {at: self.exact[left - self._sizes[at], lane] + self._values[at, lane] for at in fitting}
            at = next(at for at, worth in made.items() if worth == wanted)
            counts[self._sizes[at]] += 1
            left -= self._sizes[at]
        return tuple(ReplicaSize(tp=tp, count=counts[tp]) for tp in reversed(self._sizes) if counts[tp])
