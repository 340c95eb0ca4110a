"""The HTTP dialects that the gateway speaks."""
