"""Decides how many devices roll out, train and score: pure functions over snapshots. Imports no stage, does no I/O."""
