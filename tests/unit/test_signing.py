import pytest

from steelyard.signing import Signer

SECRET = b"s" * 32


def test_a_signed_statement_is_read_back() -> None:
    signer = Signer(SECRET, prefix="k-", purpose=b"one")
    key = signer.sign("subject.with.dots", 1000.5)
    assert key.startswith("k-subject.with.dots.1001.")
    assert signer.read(key) == ("subject.with.dots", 1001)


def test_a_key_of_another_purpose_is_none_of_ours_though_secret_and_prefix_are_the_same() -> None:
    key = Signer(SECRET, prefix="k-", purpose=b"one").sign("subject", 1000.0)
    assert Signer(SECRET, prefix="k-", purpose=b"two").read(key) is None


@pytest.mark.parametrize("key", ["", "k-", "subject.1000.x", "k-subject.1000.", "k-subject.1000", "k-\udcff.1.x", "ü"])
def test_anything_else_is_no_key(key: str) -> None:
    assert Signer(SECRET, prefix="k-", purpose=b"one").read(key) is None


@pytest.mark.parametrize(("size", "purpose"), [(31, b"one"), (65, b"one"), (32, b"x" * 17)])
def test_a_secret_or_purpose_of_the_wrong_size_is_refused(size: int, purpose: bytes) -> None:
    with pytest.raises(ValueError, match="bytes"):
        Signer(b"s" * size, prefix="k-", purpose=purpose)
