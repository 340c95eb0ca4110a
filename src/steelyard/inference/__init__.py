"""Inference: engines that turn prompt tokens into sampled tokens, log-probabilities and weight versions."""
