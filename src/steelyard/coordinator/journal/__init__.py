"""The journal: the run's only durable truth, an append-only chain of events."""
