"""What people see of a run: rows of numbers, the terminal display and the report. Nothing here decides anything."""
