"""Environments: tasks, tools and graders. The built-in one is ``repair``."""
