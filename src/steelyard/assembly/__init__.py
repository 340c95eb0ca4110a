"""From sealed traces and scores to the batch of one optimizer step. Pure: no I/O, no clock, no torch."""
