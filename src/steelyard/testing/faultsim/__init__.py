"""Deterministic fault simulation: the real coordinator, worker and scorer on a virtual clock, driven by one seed."""
