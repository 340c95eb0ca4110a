"""The way of every model call: capability, prompt tokens, engine, record."""
