import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import Refused
from steelyard.gateway.capability import KeyRing

KEYS = KeyRing(b"s" * 32)


def test_a_key_names_its_attempt_until_it_expires() -> None:
    key = KEYS.issue("att_5k9", 1000.5)
    assert KEYS.verify(key, 1000.9) == "att_5k9"
    with pytest.raises(Refused, match="expired") as caught:
        KEYS.verify(key, 1001.0)
    assert caught.value.reason == "expired"


@given(position=st.integers(min_value=0), char=st.characters())
def test_a_changed_key_is_foreign_and_is_never_repeated_in_the_message(position: int, char: str) -> None:
    key = KEYS.issue("att_5k9", 1000.0)
    position %= len(key)
    changed = key[:position] + char + key[position + 1 :]
    if changed == key:
        return
    with pytest.raises(Refused) as caught:
        KEYS.verify(changed, 0.0)
    assert caught.value.reason == "foreign"
    assert changed not in str(caught.value)


@pytest.mark.parametrize("key", ["", "sty-", "sk-abc", "sty-att_5k9.1000", "sty-..", "sty-att_5k9.1000."])
def test_what_is_no_key_is_foreign(key: str) -> None:
    with pytest.raises(Refused, match="foreign"):
        KEYS.verify(key, 0.0)


def test_another_runs_key_is_foreign() -> None:
    with pytest.raises(Refused, match="foreign"):
        KEYS.verify(KeyRing(b"t" * 32).issue("att_5k9", 1000.0), 0.0)


@pytest.mark.parametrize("size", [0, 31, 65])
def test_a_secret_of_the_wrong_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="32 to 64 bytes"):
        KeyRing(b"s" * size)
