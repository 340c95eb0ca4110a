"""The real coordinator, workers, scorer and trainer under simulated faults; see ``steelyard.testing.faultsim``."""

import pytest

from steelyard.testing.faultsim.mutations import MUTATIONS
from steelyard.testing.faultsim.world import Verdict, simulate

SLICE = range(150)
"""Seeds that every change must pass; ``benchmarks/fault_simulation.py`` runs many more."""


def of_failing(verdict: Verdict) -> str:
    return (
        f"seed {verdict.seed}: {verdict.failure}\n"
        f"replay it: python -m steelyard.testing.faultsim --verbose --seed {verdict.seed}"
    )


def test_a_run_without_faults_ends_with_all_invariants() -> None:
    verdict = simulate(0, is_faulty=False)
    assert verdict.failure is None, of_failing(verdict)
    assert not verdict.faults
    assert verdict.num_events > 50


def test_every_seed_of_the_slice_ends_with_all_invariants() -> None:
    verdicts = [simulate(seed) for seed in SLICE]
    failing = [verdict for verdict in verdicts if verdict.failure is not None]
    assert not failing, "\n".join(of_failing(verdict) for verdict in failing[:5])
    happened = {kind for verdict in verdicts for kind, count in verdict.faults.items() if count}
    assert happened == {"kill", "stop", "power", "partition", "weather", "disk", "objects", "clock", "moment"}
    counted = {name for verdict in verdicts for name, count in verdict.counters.items() if count}
    assert {"lease_expired", "refused.expired", "refused.double", "refused.foreign", "duplicate.score"} <= counted


def test_a_seed_gives_the_same_trace_whenever_it_runs() -> None:
    for seed in (1, 2, 3):
        assert simulate(seed, is_verbose=True) == simulate(seed, is_verbose=True)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_of_the_logic_is_found_by_a_seed_of_the_slice(name: str) -> None:
    found = next((seed for seed in SLICE if simulate(seed, mutation=MUTATIONS[name]).failure is not None), None)
    assert found is not None, f"no seed of the slice finds {name!r}"
