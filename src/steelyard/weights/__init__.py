"""Publication of policy versions and proof of what was loaded. ``manifest`` and ``retention`` need no torch."""
