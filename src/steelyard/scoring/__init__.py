"""Verdicts on sealed artifacts: graders in killable processes, outcomes as types."""
