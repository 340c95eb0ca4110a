"""Templates and names."""

import random
from itertools import chain

import pytest

from steelyard.environments.repair.catalogue import draw_constants
from steelyard.environments.repair.template import NAMES, rename
from steelyard.environments.repair.templates import SEEN_TEMPLATES, TEMPLATES, UNSEEN_TEMPLATES


def test_there_are_many_templates_and_no_name_twice() -> None:
    assert len(SEEN_TEMPLATES) >= 24
    assert len(UNSEEN_TEMPLATES) >= 30
    assert len(TEMPLATES) == len(SEEN_TEMPLATES) + len(UNSEEN_TEMPLATES)


def test_unseen_templates_share_neither_text_nor_description_with_seen_ones() -> None:
    seen = {(template.doc, template.source) for template in SEEN_TEMPLATES}
    for template in UNSEEN_TEMPLATES:
        assert template.doc not in {doc for doc, _ in seen}
        assert template.source not in {source for _, source in seen}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=lambda template: template.name)
def test_a_template_has_four_to_ten_lines(template: object) -> None:
    found = TEMPLATES[template.name]  # type: ignore[attr-defined]
    constants = {name: "3" for name, _, _ in found.constants} | dict.fromkeys(found.letters, "'a'")
    assert 4 <= len(found.lines(constants)) <= 10


def test_no_name_stands_for_two_things() -> None:
    names = list(chain.from_iterable(NAMES.values()))
    assert len(names) == len(set(names))
    for canonical, choices in NAMES.items():
        assert canonical in choices


def test_renaming_touches_whole_names_outside_quotes_only() -> None:
    assert rename("x = axe + x + 'x'", {"x": "v"}) == "v = axe + v + 'x'"


def test_constants_stay_in_their_range() -> None:
    template = TEMPLATES["clamp"]
    drawn = [dict(draw_constants(template, random.Random(seed))) for seed in range(200)]
    assert {int(constants["K"]) for constants in drawn} == {1, 2, 3}
    assert {int(constants["M"]) for constants in drawn} == {5, 6, 7, 8}
