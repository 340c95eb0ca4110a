"""Steelyard: agentic-RL post-training that can prove where every trained token came from."""

__version__ = "0.1.0"
