"""Identifiers: never twice, and from a seed always the same."""

import random
import subprocess
import sys

from steelyard.ids import RandomIds, SeededIds

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def by_division(number: int) -> str:
    chars = []
    for _ in range(16):
        number, digit = divmod(number, 32)
        chars.append(ALPHABET[digit])
    return "".join(chars)


def test_seeded_ids_are_the_digits_of_the_numbers_drawn() -> None:
    ids, numbers = SeededIds(5), random.Random(5)
    for _ in range(100):
        assert ids.new("att") == f"att_{by_division(numbers.getrandbits(80))}"


def test_random_ids_are_all_unlike_and_use_the_whole_alphabet() -> None:
    ids = RandomIds()
    drawn = [ids.new("rol") for _ in range(1000)]
    assert len(set(drawn)) == 1000
    assert all(len(name) == 20 and name.startswith("rol_") for name in drawn)
    assert {char for name in drawn for char in name.removeprefix("rol_")} == set(ALPHABET)


FORKING = """
import os
from steelyard.ids import RandomIds
ids = RandomIds()
ids.new("att")
child = os.fork()
os.write(1, f"{ids.new('att')}\\n".encode())  # in one piece: both write to the same pipe
if child:
    os.waitpid(child, 0)
"""


def test_a_forked_process_draws_ids_of_its_own() -> None:
    # In a process with one thread, as a fork must be.
    drawn = subprocess.run([sys.executable, "-c", FORKING], check=True, capture_output=True, text=True).stdout.split()
    assert len(set(drawn)) == len(drawn) == 2
