"""Where tasks come from, and in which order."""
