"""The function templates of ``repair``: those that are trained on, and those that never are.

Some of the unseen ones are close relatives of seen ones (``unseen_templates`` then asks for the same idea in
another place), the others are wholly different.
"""

from steelyard.environments.repair.list_templates import BUILDERS, FOLDS, SEARCHES
from steelyard.environments.repair.scalar_templates import NUMBERS, RELATIVES, TEXTS
from steelyard.environments.repair.template import Template

_DIFFERENT = frozenset(
    {
        "add_position",
        "alternating",
        "average_floor",
        "backwards",
        "clipped",
        "count_divisors",
        "countdown",
        "differences",
        "digit_sum",
        "dot",
        "drop_divisible",
        "index_of_largest",
        "initials",
        "is_sorted",
        "keep_between",
        "larger_of_each",
        "longest_run",
        "multiples",
        "power",
        "price",
        "repeat_letters",
        "replaced",
        "reverse_text",
        "rotated",
        "running_sum",
        "smallest_above",
        "starting_with",
        "sum_times",
        "without_repeats",
    }
)
_ALL: tuple[Template, ...] = (*FOLDS, *SEARCHES, *BUILDERS, *NUMBERS, *TEXTS, *RELATIVES)

UNSEEN_TEMPLATES: tuple[Template, ...] = tuple(
    template for template in _ALL if template in RELATIVES or template.name in _DIFFERENT
)
SEEN_TEMPLATES: tuple[Template, ...] = tuple(template for template in _ALL if template not in UNSEEN_TEMPLATES)
TEMPLATES: dict[str, Template] = {template.name: template for template in _ALL}
