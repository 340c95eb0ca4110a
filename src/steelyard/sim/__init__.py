"""Simulates a cluster on virtual time: the real coordinator and router, with models of devices, tools and trainer."""
