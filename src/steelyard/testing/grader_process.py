"""A grader process for tests: ``python -m steelyard.testing.grader_process SOCKET PARENT_PID``.

The artifact says what the grader does with it: ``hang`` computes for ever, ``wait`` waits for ever, ``exit``
ends the process, ``raise`` raises, ``nan`` says nan, and anything else is worth its number of bytes.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from steelyard.processes.child import die_with_parent
from steelyard.scoring.process import serve_grader
from steelyard.testing.sandbox import FakePool
from steelyard.types import Verdict

VERIFIER_VERSION = "moody-1"


class MoodyGrader:
    """Does what the artifact says; records nothing."""

    verifier_version = VERIFIER_VERSION
    deterministic = True

    async def grade(self, task_id: str, artifact: bytes, sandbox: Any) -> Verdict:
        """See :class:`steelyard.scoring.base.Grader`."""
        match artifact:
            case b"hang":
                # In variables, since the compiler refuses to compute it beforehand.
                nine = 9
                return Verdict(value=float(nine**nine**nine**nine), success=True)
            case b"wait":
                await asyncio.get_running_loop().create_future()
            case b"exit":
                os._exit(3)
            case b"raise":
                raise KeyError("expected")
            case b"nan":
                return Verdict(value=float("nan"), success=True)
        return Verdict(value=float(len(artifact)), success=True, detail=task_id)


def main() -> None:
    """Serve until killed."""
    path, parent = sys.argv[1:]
    die_with_parent(int(parent))
    asyncio.run(serve_grader(Path(path), MoodyGrader(), FakePool()))


if __name__ == "__main__":
    main()
