"""Identifiers: never twice, and from a seed always the same."""

import os
import random

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


def test_a_forked_process_draws_ids_of_its_own() -> None:
    ids = RandomIds()
    ids.new("att")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, ids.new("att").encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100).decode() != ids.new("att")
    os.close(reader)
    os.close(writer)
