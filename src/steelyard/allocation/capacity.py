"""How many slots a stage needs: Little's law for the mean, queueing for waits, bursts and failures.

A slot serves one request at a time. With ``rate`` requests a second of ``service`` seconds each, ``a = rate *
service`` slots are busy on average (Little, Operations Research 9(3), 1961). Waits follow Erlang's C formula for
``c`` slots (Erlang, 1917)::

    P(wait > t) = C(c, a) exp(-(c - a) t / (service V))

with ``V = (1 + cv^2) / 2`` for service times whose coefficient of variation is ``cv`` (Allen and Cunneen; exact for
cv = 1). A burst is a fluid: for ``b`` seconds arrivals are ``f`` times as many, what exceeds the slots queues up, and
the last of it waits ``(f a - c) b / c``.
"""

import math

from steelyard.errors import InputError
from steelyard.types.record import Record


class CapacityQuestion(Record, frozen=True, kw_only=True):
    """What is asked.

    Attributes:
        rate_per_s: requests per second, on average.
        service_s: mean time that one takes a slot.
        service_cv: standard deviation of that time over its mean; 1 is exponential, heavy tails are above.
        wait_s: what ``quantile`` of the requests must not exceed in the queue.
        burst_factor, burst_s: arrivals are so many times the average, for so long.
        slots_per_host, failed_hosts: slots that fail together, and how many such hosts may be down.
    """

    rate_per_s: float
    service_s: float
    service_cv: float = 1.0
    wait_s: float = 1.0
    quantile: float = 0.99
    burst_factor: float = 1.0
    burst_s: float = 0.0
    slots_per_host: int = 1
    failed_hosts: int = 0

    def __post_init__(self) -> None:
        for field in ("rate_per_s", "service_s"):
            if not 0.0 < getattr(self, field) < math.inf:
                raise InputError(f"{field} must be finite and > 0, got {getattr(self, field)}")
        for field, least in (("service_cv", 0.0), ("wait_s", 0.0), ("burst_factor", 1.0), ("burst_s", 0.0)):
            if not least <= getattr(self, field) < math.inf:
                raise InputError(f"{field} must be finite and >= {least:g}, got {getattr(self, field)}")
        if not 0.0 < self.quantile < 1.0:
            raise InputError(f"quantile must be between 0 and 1, got {self.quantile}")
        for field, fewest in (("slots_per_host", 1), ("failed_hosts", 0)):
            if getattr(self, field) < fewest:
                raise InputError(f"{field} must be >= {fewest}, got {getattr(self, field)}")
        if self.busy_slots > _MOST_SLOTS:
            raise InputError(
                f"rate_per_s * service_s must be at most {_MOST_SLOTS:,}, the slots that are busy, "
                f"got {self.busy_slots:,.0f}"
            )

    @property
    def busy_slots(self) -> float:
        """Slots that are busy on average."""
        return self.rate_per_s * self.service_s


class CapacityAnswer(Record, frozen=True, kw_only=True):
    """Slots for each demand, each on top of the one before.

    Attributes:
        busy_slots: busy on average; fewer than this and the queue grows without end.
        slots_for_wait: so that the wait's quantile holds.
        slots_for_burst: so that it holds for the last request of a burst too.
        num_hosts, num_slots: with the hosts that may fail.
        wait_quantile_s: the quantile of the wait with ``slots_for_wait``.
        wait_prob: the share of requests that wait at all, with these.
        utilisation: busy share of ``num_slots`` while nothing has failed.
    """

    busy_slots: float
    slots_for_wait: int
    slots_for_burst: int
    num_hosts: int
    num_slots: int
    wait_quantile_s: float
    wait_prob: float
    utilisation: float


_MOST_SLOTS = 1_000_000


def waiting_probability(num_slots: int, busy_slots: float) -> float:
    """Erlang's C: the share of requests that find all slots busy. 1 where the slots do not suffice.

    By the recursion of Erlang's B, which neither overflows nor cancels.
    """
    if num_slots <= busy_slots:
        return 1.0
    inverse = 1.0
    for slots in range(1, num_slots + 1):
        inverse = 1.0 + inverse * slots / busy_slots
        if inverse > _NEVER:
            return 0.0
    blocked = 1.0 / inverse
    return blocked / (1.0 - busy_slots / num_slots * (1.0 - blocked))


_NEVER = 1e300


def wait_quantile_s(question: CapacityQuestion, num_slots: int) -> float:
    """The quantile of the time in the queue with so many slots, in seconds; infinite where they do not suffice."""
    busy = question.busy_slots
    if num_slots <= busy:
        return math.inf
    waits = waiting_probability(num_slots, busy)
    late = 1.0 - question.quantile
    if waits <= late:
        return 0.0
    variability = (1.0 + question.service_cv**2) / 2.0
    return math.log(waits / late) * question.service_s * variability / (num_slots - busy)


def answer(question: CapacityQuestion) -> CapacityAnswer:
    """How many slots it takes."""
    slots = _slots_for_wait(question)
    for_burst = max(slots, _slots_for_burst(question))
    num_hosts = math.ceil(for_burst / question.slots_per_host) + question.failed_hosts
    num_slots = num_hosts * question.slots_per_host
    return CapacityAnswer(
        busy_slots=question.busy_slots,
        slots_for_wait=slots,
        slots_for_burst=for_burst,
        num_hosts=num_hosts,
        num_slots=num_slots,
        wait_quantile_s=wait_quantile_s(question, slots),
        wait_prob=waiting_probability(slots, question.busy_slots),
        utilisation=question.busy_slots / num_slots,
    )


def _slots_for_wait(question: CapacityQuestion) -> int:
    """The least number whose quantile holds: it falls with every slot, so the search halves."""
    low = math.floor(question.busy_slots)
    high = low + 1
    while wait_quantile_s(question, high) > question.wait_s:
        low, high = high, high + 2 * (high - math.floor(question.busy_slots))
    while high - low > 1:
        middle = (low + high) // 2
        if wait_quantile_s(question, middle) > question.wait_s:
            low = middle
        else:
            high = middle
    return high


def _slots_for_burst(question: CapacityQuestion) -> int:
    """So many that what a burst heaps up is served within the wait that is allowed."""
    if question.burst_factor == 1.0 or question.burst_s == 0.0:
        return 0
    peak = question.busy_slots * question.burst_factor
    return math.ceil(peak * question.burst_s / (question.wait_s + question.burst_s) - 1e-9)
