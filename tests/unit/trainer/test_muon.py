"""Muon over stacks: the library's update, for any mixture of shapes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.trainer.muon import StackedMuon, orthogonalised

SHAPES = ((8, 8), (4, 12), (12, 4), (8, 8), (4, 12), (16, 8))


def matrices(seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in SHAPES]


def put_gradients(parameters: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(*parameter.shape, generator=generator)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), rate=st.sampled_from([0.001, 0.02]), weight_decay=st.sampled_from([0.0, 0.1]))
def test_steps_are_those_of_the_library_within_its_own_rounding(seed: int, rate: float, weight_decay: float) -> None:
    ours, theirs = matrices(seed), matrices(seed)
    stacked = StackedMuon(ours, weight_decay)
    library = torch.optim.Muon(theirs, lr=rate, weight_decay=weight_decay)
    for step in range(3):
        put_gradients(ours, seed + 7919 * step)
        put_gradients(theirs, seed + 7919 * step)
        stacked.step(rate)
        library.step()  # type: ignore[no-untyped-call]
    for left, right, start in zip(ours, theirs, matrices(seed), strict=True):
        # Both iterate in bfloat16, with eight bits, and round at other places.
        torch.testing.assert_close(left, right, atol=0.05 * rate, rtol=0.0)
        assert not torch.equal(left, start)


def test_singular_values_come_out_near_one_for_wide_and_tall_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 10, 24), (3, 24, 10)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(*shape, generator=generator)))
        assert float(values.min()) > 0.5
        assert float(values.max()) < 1.3


def test_a_gradient_of_zero_moves_nothing_but_by_decay() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.zeros(4, 4)
    StackedMuon([parameter], weight_decay=0.5).step(0.1)
    torch.testing.assert_close(parameter.detach(), torch.full((4, 4), 0.95))
