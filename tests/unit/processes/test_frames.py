import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import RemoteFailed
from steelyard.processes.frames import MAX_FRAME_BYTES, Frame, FrameBuffer, encode

FRAMES = [
    Frame(i, "reply", "", msgspec.Raw(msgspec.msgpack.encode("x" * size))) for i, size in enumerate((0, 1, 300, 7))
]
BYTES = b"".join(map(encode, FRAMES))


def as_tuples(frames: list[Frame]) -> list[tuple[int, bytes]]:
    return [(frame.id, bytes(frame.body)) for frame in frames]


@given(cuts=st.lists(st.integers(0, len(BYTES)), max_size=8).map(sorted))
def test_frames_come_out_whole_and_in_order_however_the_bytes_arrive(cuts: list[int]) -> None:
    buffer = FrameBuffer()
    found = [
        frame
        for start, end in zip([0, *cuts], [*cuts, len(BYTES)], strict=True)
        for frame in buffer.feed(BYTES[start:end])
    ]
    assert as_tuples(found) == as_tuples(FRAMES)


@pytest.mark.parametrize("data", [(MAX_FRAME_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\x01\xc0"])
def test_bytes_that_are_no_frame_are_an_error(data: bytes) -> None:
    with pytest.raises(RemoteFailed, match="a frame must be"):
        FrameBuffer().feed(data)
