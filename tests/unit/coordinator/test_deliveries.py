from hypothesis import given
from hypothesis import strategies as st

from steelyard.coordinator.deliveries import Deliveries

STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.sampled_from("12345")))


@given(steps=STEPS, arrived=st.frozensets(st.sampled_from("12345")))
def test_what_was_added_and_not_removed_and_is_not_known_is_lost(
    steps: list[tuple[bool, str, str]], arrived: frozenset[str]
) -> None:
    deliveries = Deliveries()
    model: dict[str, str] = {}
    for is_added, receiver, name in steps:
        if not is_added:
            deliveries.remove(name)
            model.pop(name, None)
        elif name not in model:
            deliveries.add(receiver, name)
            model[name] = receiver
    for receiver in "ab":
        expected = [name for name, to in model.items() if to == receiver and name not in arrived]
        assert deliveries.lost(receiver, arrived) == expected
