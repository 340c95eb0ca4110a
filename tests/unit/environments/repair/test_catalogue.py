"""Good bugs and held-out pairs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.environments.repair.catalogue import (
    MIN_FAILING,
    POOL_SIZE,
    draw_constants,
    failing_cases,
    good_mutants,
    make_variant,
    passes,
    same_value,
    split_kinds,
)
from steelyard.environments.repair.execution import run_known
from steelyard.environments.repair.mutations import MutationKind, apply_mutant
from steelyard.environments.repair.templates import TEMPLATES
from steelyard.types import CallStatus


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_returns_on_all_its_inputs_for_all_constants(name: str) -> None:
    template = TEMPLATES[name]
    constants = {draw_constants(template, random.Random(seed)) for seed in range(60)}
    for chosen in constants:
        assert len(make_variant(name, chosen).pool) >= POOL_SIZE // 2


@given(st.sampled_from(sorted(TEMPLATES)), st.integers(0, 2**32))
def test_a_good_bug_ends_quickly_and_is_wrong_on_several_inputs(name: str, seed: int) -> None:
    variant = make_variant(name, draw_constants(TEMPLATES[name], random.Random(seed)))
    for kind in MutationKind:
        for index in good_mutants(variant, kind):
            lines = apply_mutant(variant.lines, variant.mutants[index])
            results = run_known(lines, [case.arguments for case in variant.pool])
            wrong = tuple(i for i, case in enumerate(variant.pool) if not passes(results[i], case))
            assert wrong == failing_cases((name, variant.constants), index)
            assert len(wrong) >= MIN_FAILING
            assert all(result.status is not CallStatus.TIMED_OUT for result in results)


@pytest.mark.parametrize("name", TEMPLATES)
def test_held_out_kinds_are_disjoint_and_touch_no_line_that_training_leaves_alone(name: str) -> None:
    kinds = split_kinds(name)
    assert kinds.train
    assert not set(kinds.train) & set(kinds.held_out)
    template = TEMPLATES[name]
    middle = tuple((key, str((least + greatest) // 2)) for key, least, greatest in template.constants)
    variant = make_variant(name, (*middle, *((key, "'a'") for key in template.letters)))
    lines = {
        split: {variant.mutants[i].number for kind in chosen for i in good_mutants(variant, kind)}
        for split, chosen in (("train", kinds.train), ("held_out", kinds.held_out))
    }
    assert lines["held_out"] <= lines["train"]


def test_a_fair_share_of_all_pairs_is_held_out() -> None:
    splits = [split_kinds(name) for name in TEMPLATES]
    num_held_out = sum(len(split.held_out) for split in splits)
    assert 0.1 <= num_held_out / (num_held_out + sum(len(split.train) for split in splits)) <= 0.3


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [(1, 1, True), (1, True, False), ([1], [True], False), ([], "", False), ([1, 2], [1], False), ("a", "a", True)],
)
def test_values_are_the_same_only_with_the_same_type(left: object, right: object, expected: bool) -> None:
    assert same_value(left, right) is expected
