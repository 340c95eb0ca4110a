"""Real processes that are killed and stopped while they work for one coordinator over HTTP."""
