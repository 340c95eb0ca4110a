"""The function templates of ``repair``: those that are trained on, and those that never are.

Some of the unseen ones are close relatives of seen ones (``unseen_templates`` then asks for the same idea in
another place), the others are wholly different.
"""

from steelyard.environments.repair.list_templates import BUILDERS, FOLDS, SEARCHES
from steelyard.environments.repair.scalar_templates import NUMBERS, RELATIVES, TEXTS
from steelyard.environments.repair.template import Template

_DIFFERENT = frozenset(
    {
        "alternating",
        "average_floor",
        "backwards",
        "digit_sum",
        "dot",
        "initials",
        "is_sorted",
        "keep_between",
        "longest_run",
        "multiples",
        "power",
        "price",
        "replaced",
        "reverse_text",
        "rotated",
        "smallest_above",
        "starting_with",
        "sum_times",
    }
)
_ALL: tuple[Template, ...] = (*FOLDS, *SEARCHES, *BUILDERS, *NUMBERS, *TEXTS, *RELATIVES)

UNSEEN_TEMPLATES: tuple[Template, ...] = tuple(
    template for template in _ALL if template in RELATIVES or template.name in _DIFFERENT
)
SEEN_TEMPLATES: tuple[Template, ...] = tuple(template for template in _ALL if template not in UNSEEN_TEMPLATES)
TEMPLATES: dict[str, Template] = {template.name: template for template in _ALL}
