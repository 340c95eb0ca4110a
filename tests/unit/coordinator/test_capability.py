import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.coordinator.capability import Capability, CapabilityRing, Role, worker_of
from steelyard.errors import InputError, Refused
from steelyard.gateway.capability import KeyRing

SECRET = b"s" * 32
KEYS = CapabilityRing(SECRET)


@pytest.mark.parametrize("role", Role)
def test_a_key_states_role_name_and_expiry(role: Role) -> None:
    key = KEYS.issue(role, "wrk_5k9", 1000.5)
    assert KEYS.verify(key, 1000.9) == Capability(role=role, worker_id="wrk_5k9", expires_at_s=1001.0)
    assert worker_of(key) == "wrk_5k9"
    with pytest.raises(Refused) as caught:
        KEYS.verify(key, 1001.0)
    assert caught.value.reason == "expired"


@given(position=st.integers(min_value=0), char=st.characters())
def test_a_changed_key_is_foreign_and_is_never_repeated_in_the_message(position: int, char: str) -> None:
    key = KEYS.issue(Role.WORKER, "wrk_5k9", 1000.0)
    position %= len(key)
    changed = key[:position] + char + key[position + 1 :]
    if changed == key:
        return
    with pytest.raises(Refused) as caught:
        KEYS.verify(changed, 0.0)
    assert caught.value.reason == "foreign"
    assert changed not in str(caught.value)


def test_an_attempts_key_of_the_gateway_opens_nothing_here_under_the_same_secret() -> None:
    key = KeyRing(SECRET).issue("worker.wrk_5k9", 1000.0)
    with pytest.raises(Refused, match="foreign"):
        KEYS.verify(key.replace("sty-", "stc-"), 0.0)


@pytest.mark.parametrize("worker_id", ["", "a.b", "a b", "ü", "x" * 65])
def test_a_name_that_does_not_fit_a_key_is_bad_input(worker_id: str) -> None:
    with pytest.raises(InputError, match="worker_id"):
        KEYS.issue(Role.WORKER, worker_id, 1000.0)


@pytest.mark.parametrize("key", ["", "stc-", "sty-worker.wrk.1.x", "stc-worker.wrk.1", "stc-worker..1.x"])
def test_what_has_not_the_form_of_a_key_is_bad_input_that_is_not_repeated(key: str) -> None:
    with pytest.raises(InputError, match="key: must be stc-<role>"):
        worker_of(key)
