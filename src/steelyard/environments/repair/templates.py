"""The function templates of ``repair``: those that are trained on, and those that never are."""

from steelyard.environments.repair.list_templates import BUILDERS, FOLDS, SEARCHES
from steelyard.environments.repair.scalar_templates import NUMBERS, TEXTS, UNSEEN
from steelyard.environments.repair.template import Template

SEEN_TEMPLATES: tuple[Template, ...] = (*FOLDS, *SEARCHES, *BUILDERS, *NUMBERS, *TEXTS)
UNSEEN_TEMPLATES: tuple[Template, ...] = UNSEEN
TEMPLATES: dict[str, Template] = {template.name: template for template in (*SEEN_TEMPLATES, *UNSEEN_TEMPLATES)}
