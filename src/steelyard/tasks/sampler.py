"""The order of training tasks: shuffled, endless, and a function of the position alone.

The coordinator journals how many positions it has admitted; that number is the whole cursor. Whatever happens, the
next task is the one at that position: none is skipped, none comes twice within one pass over the tasks.
"""

from collections.abc import Callable

import xxhash

from steelyard.errors import InputError
from steelyard.types import TaskRef

_NUM_ROUNDS = 4


class ShuffledStream:
    """Every pass (epoch) visits each of ``num_tasks`` tasks once, in an order of its own.

    The order is a four-round Feistel network over the smallest even number of bits that holds ``num_tasks``, walked
    until it lands inside the range (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    So any position costs constant time and memory, however many tasks there are, and nothing has to be stored.

    Args:
        num_tasks: number of distinct tasks, at least 1; task indices are 0 to ``num_tasks - 1``.
        seed: same seed, same order.
        task_id: the id of a task, by its index.
        num_epochs: after so many passes the stream ends; None is endless.

    Raises:
        InputError: a count is not positive.
    """

    def __init__(
        self, num_tasks: int, seed: int, task_id: Callable[[int], str], *, num_epochs: int | None = None
    ) -> None:
        if num_tasks < 1:
            raise InputError(f"num_tasks must be at least 1, got {num_tasks}")
        if num_epochs is not None and num_epochs < 1:
            raise InputError(f"num_epochs must be at least 1 or None, got {num_epochs}")
        self._num_tasks = num_tasks
        self._seed = seed
        self._task_id = task_id
        self._num_epochs = num_epochs
        self._half_bits = max(1, (max(num_tasks - 1, 1).bit_length() + 1) // 2)

    def at(self, position: int) -> TaskRef | None:
        """The task at ``position``, from 0 on; None where the stream has ended."""
        if position < 0:
            raise InputError(f"position must be at least 0, got {position}")
        epoch, offset = divmod(position, self._num_tasks)
        if self._num_epochs is not None and epoch >= self._num_epochs:
            return None
        index = self._permute(offset, epoch)
        return TaskRef(position=position, epoch=epoch, task_index=index, task_id=self._task_id(index))

    def _permute(self, offset: int, epoch: int) -> int:
        index = self._encipher(offset, epoch)
        while index >= self._num_tasks:
            index = self._encipher(index, epoch)
        return index

    def _encipher(self, number: int, epoch: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = number >> self._half_bits, number & mask
        for round_index in range(_NUM_ROUNDS):
            key = f"{self._seed}/{epoch}/{round_index}/{right}".encode()
            left, right = right, left ^ (xxhash.xxh3_64_intdigest(key) & mask)
        return (left << self._half_bits) | right
