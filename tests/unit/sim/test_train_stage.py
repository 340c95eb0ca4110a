"""Layouts of a simulated trainer: more devices never train slower, for some may idle."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.allocation.roofline import Corrections
from steelyard.allocation.synthetic import LengthSpec, SyntheticSpec, draw_workload
from steelyard.errors import InputError
from steelyard.sim.bound import train_batch
from steelyard.sim.setup import SimSetup
from steelyard.sim.train_stage import TrainLayouts
from steelyard.testing.toy_devices import TOY_MODEL, toy_device


@settings(deadline=None, max_examples=20)
@given(
    st.integers(0, 1000), st.integers(2, 24), st.sampled_from([5e8, 4e9]), st.sampled_from([20, 500]), st.floats(1, 3)
)
def test_more_devices_never_take_longer_and_the_least_number_fits(
    seed: int, num_devices: int, memory_bytes: float, median: int, slower: float
) -> None:
    spec = SyntheticSpec(
        num_groups=4,
        group_size=4,
        turns=LengthSpec(median=2, sigma=0.5),
        generated_tokens=LengthSpec(median=median, sigma=1.0, longest=1500),
        first_prompt_tokens=LengthSpec(median=100),
        tool_result_tokens=LengthSpec(median=10),
        tool_s=LengthSpec(median=0.1),
        max_context_tokens=4096,
    )
    setup = SimSetup(
        name="s",
        device=toy_device(memory_bytes),
        num_devices=num_devices + 1,
        model=TOY_MODEL,
        corrections=Corrections(communication=slower),
        workload=draw_workload(spec, "w", Random(seed)),
        num_steps=1,
        groups_per_batch=4,
        max_policy_lag=1,
    )
    layouts, batch = TrainLayouts(setup), train_batch(setup.admitted_groups())
    try:
        least = layouts.least_devices(1)
    except InputError:
        return
    if least <= num_devices:
        fewer, more = (layouts.best(number, batch).step_s(batch) for number in (num_devices, num_devices + 1))
        assert more <= fewer * (1 + 1e-9)
