"""The environment ``repair``: a small function with one seeded bug, to be found and mended."""
