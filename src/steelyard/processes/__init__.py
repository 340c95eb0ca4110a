"""Processes of a run on one machine: calls between them over Unix sockets, and their supervision."""
