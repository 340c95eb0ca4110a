"""The plots of a simulation: devices by role, queues, lag, throughput and the parts of a step, over virtual time."""

import bisect
from collections.abc import Sequence

from steelyard.observe.area_chart import Area, area_chart
from steelyard.observe.charts import Chart, Frame, Series, line_chart, stacked_chart
from steelyard.sim.simulation import SimResult
from steelyard.sim.timeline import Sample

_MOST_STRETCHES = 200
_UNITS = ((3.0 * 3600.0, 3600.0, "h"), (300.0, 60.0, "min"), (0.0, 1.0, "s"))


class Amount:
    """A sum over time that grows in straight lines between the points that are known."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._times = [at_s for at_s, _ in points]
        self._sums = [value for _, value in points]

    def at(self, at_s: float) -> float:
        """The sum up to ``at_s``."""
        index = bisect.bisect_right(self._times, at_s)
        if index == 0:
            return 0.0
        if index == len(self._times):
            return self._sums[-1]
        (left, right), (low, high) = self._times[index - 1 : index + 1], self._sums[index - 1 : index + 1]
        return low + (high - low) * (at_s - left) / (right - left)

    def rates(self, edges: Sequence[float]) -> list[float]:
        """For each stretch between two edges, what was added per second."""
        sums = [self.at(edge) for edge in edges]
        return [
            (after - before) / (right - left)
            for before, after, left, right in zip(sums, sums[1:], edges, edges[1:], strict=False)
        ]


def time_unit(makespan_s: float) -> tuple[float, str]:
    """Seconds of the unit that suits a run of that length, and the unit's name."""
    return next((seconds, name) for least_s, seconds, name in _UNITS if makespan_s >= least_s)


def device_chart(result: SimResult, num_devices: int) -> Chart | None:
    """What the devices did: by role, busy and idle, and on their way between roles."""
    samples = result.timeline
    edges = _edges(samples)
    if len(edges) < 2:
        return None
    rollout, train, reward, moving = (
        _held(samples, [getattr(sample, role) for sample in samples]).rates(edges)
        for role in ("rollout", "train", "reward", "moving")
    )
    busy_rollout = _busy(samples, "rollout_busy_s").rates(edges)
    busy_reward = _busy(samples, "reward_busy_s").rates(edges)
    busy_train = _trained(result).rates(edges)
    areas = [
        *_busy_and_idle("rollout", 0, rollout, busy_rollout),
        Area(name="changing roles", values=tuple(moving), colour=4),
        *_busy_and_idle("train", 1, train, busy_train),
        *_busy_and_idle("reward", 2, reward, busy_reward),
    ]
    seconds, unit = time_unit(result.makespan_s)
    frame = Frame(title="Devices by role", note="busy in full colour, idle pale", x_name=f"virtual time, {unit}")
    return area_chart(frame, [edge / seconds for edge in edges], areas, float(num_devices))


def other_charts(result: SimResult, max_policy_lag: int, batch_trajectories: int) -> tuple[Chart, ...]:
    """Queues, throughput, lag and the parts of a step."""
    seconds, unit = time_unit(result.makespan_s)
    times = [sample.at_s / seconds for sample in result.timeline]
    queues = line_chart(
        Frame(title="Queues", x_name=f"virtual time, {unit}", from_zero=True),
        times,
        [
            _queue(result.timeline, "rollout_queue", "calls that wait for a replica", 0),
            _queue(result.timeline, "train_backlog", "trajectories in complete groups", 1),
            _queue(result.timeline, "reward_queue", "trajectories without a score", 2),
        ],
    )
    edges = _edges(result.timeline)
    tokens = _busy(result.timeline, "generated_tokens").rates(edges)
    sampled = line_chart(
        Frame(title="Sampled tokens per second", x_name=f"virtual time, {unit}", from_zero=True),
        [edge / seconds for edge in edges[:-1]],
        [Series(name="tokens/s", values=tuple(tokens))],
    )
    charts = (queues, sampled, _throughput_chart(result, batch_trajectories), _lag_chart(result, max_policy_lag))
    return tuple(chart for chart in (*charts, _step_chart(result)) if chart is not None)


def _throughput_chart(result: SimResult, batch_trajectories: int) -> Chart | None:
    """From the start on, so that its last value is the run's and never above the bound."""
    rates = [batch_trajectories * (step.step + 1) / step.ended_at_s for step in result.steps]
    bound = result.num_trajectories / result.bound.makespan_s
    return line_chart(
        Frame(title="Trained trajectories per second", note="since the start", from_zero=True),
        [step.step for step in result.steps],
        [
            Series(name="reached", values=tuple(rates)),
            Series(name="proven bound of the whole run", values=(bound,) * len(rates), colour=6),
        ],
    )


def _lag_chart(result: SimResult, max_policy_lag: int) -> Chart | None:
    return line_chart(
        Frame(title="Lag at consumption", note="in steps", from_zero=True, bounds=(0.0, max(1.0, max_policy_lag))),
        [step.step for step in result.steps],
        [
            Series(name="oldest of the batch", values=tuple(float(step.max_lag) for step in result.steps), merge="max"),
            Series(name="bound", values=(float(max_policy_lag),) * len(result.steps), colour=6),
        ],
    )


def _step_chart(result: SimResult) -> Chart | None:
    """How long the trainer waited for its batch, and how long it computed."""
    steps = result.steps
    waits = tuple(step.began_at_s - step.wanted_at_s for step in steps)
    computed = tuple(step.ended_at_s - step.began_at_s for step in steps)
    return stacked_chart(
        Frame(title="Seconds of a step"),
        [step.step for step in steps],
        [
            Series(name="training", values=computed, colour=1, look="bar"),
            Series(name="waiting for a batch", values=waits, colour=5, look="bar"),
        ],
        Series(name="both", values=(None,) * len(steps), is_hidden_in_legend=True),
    )


def _busy_and_idle(role: str, colour: int, held: Sequence[float], busy: Sequence[float]) -> tuple[Area, Area]:
    used = tuple(min(one, most) for one, most in zip(busy, held, strict=True))
    idle = tuple(most - one for one, most in zip(used, held, strict=True))
    return (
        Area(name=f"{role}, busy", values=used, colour=colour),
        Area(name=f"{role}, idle", values=idle, colour=colour, is_pale=True),
    )


def _edges(samples: Sequence[Sample]) -> list[float]:
    """Of equal stretches over the whole time, not more of them than samples."""
    end_s = samples[-1].at_s if samples else 0.0
    number = min(_MOST_STRETCHES, len(samples) - 1)
    return [end_s * index / number for index in range(number + 1)] if number > 0 and end_s > 0.0 else []


def _held(samples: Sequence[Sample], counts: Sequence[int]) -> Amount:
    """Device-seconds of devices whose number stays from one sample to the next."""
    points = [(samples[0].at_s, 0.0)]
    for before, after, count in zip(samples, samples[1:], counts, strict=False):
        if after.at_s > before.at_s:
            points.append((after.at_s, points[-1][1] + count * (after.at_s - before.at_s)))
    return Amount(points)


def _busy(samples: Sequence[Sample], field: str) -> Amount:
    points = dict[float, float]()
    for sample in samples:
        points[sample.at_s] = float(getattr(sample, field))
    return Amount(sorted(points.items()))


def _trained(result: SimResult) -> Amount:
    """Device-seconds of training: known exactly, from the beginning and the end of each step."""
    points, done = [(0.0, 0.0)], 0.0
    for step in result.steps:
        if step.began_at_s > points[-1][0]:
            points.append((step.began_at_s, done))
        done += (step.ended_at_s - step.began_at_s) * step.num_devices
        if step.ended_at_s > points[-1][0]:
            points.append((step.ended_at_s, done))
    return Amount(points)


def _queue(samples: Sequence[Sample], field: str, name: str, colour: int) -> Series:
    return Series(
        name=name, values=tuple(float(getattr(sample, field)) for sample in samples), colour=colour, merge="max"
    )
