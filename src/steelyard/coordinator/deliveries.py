"""What was handed to somebody and may not have arrived: the answer of a lease call can be lost."""


class Deliveries:
    """Things by their receiver, until they are known to have arrived or are over."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, None]] = {}
        self._receiver: dict[str, str] = {}

    def add(self, receiver: str, name: str) -> None:
        """``name`` is on its way to ``receiver``."""
        self._receiver[name] = receiver
        self._of.setdefault(receiver, {})[name] = None

    def remove(self, name: str) -> None:
        """It has arrived, or is over. Idempotent."""
        receiver = self._receiver.pop(name, None)
        if receiver is not None:
            names = self._of[receiver]
            del names[name]
            if not names:
                del self._of[receiver]

    def lost(self, receiver: str, arrived: frozenset[str]) -> list[str]:
        """What ``receiver`` does not know of, given what has ``arrived``; oldest first."""
        return [name for name in self._of.get(receiver, ()) if name not in arrived]
