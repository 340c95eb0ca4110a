"""Types of the fields of the coordinator's calls: what a number or a name on the wire may be."""

from typing import Annotated

from msgspec import Meta

MAX_GRANTS = 1024
"""Leases or jobs in one answer."""

Id = Annotated[str, Meta(min_length=1, max_length=200)]
Count = Annotated[int, Meta(ge=1, le=MAX_GRANTS)]
Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=2000)]
"""Free text for the journal, such as a reason."""
