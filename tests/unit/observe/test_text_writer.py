"""A reader that stops reading stops nobody else."""

import io
import threading

from steelyard.observe.text_writer import TextWriter


class BlockedStream(io.StringIO):
    """Takes nothing until it is released; ``drained`` says that the text ``last`` is written."""

    def __init__(self, last: str = "") -> None:
        super().__init__()
        self.released, self.entered, self.drained = threading.Event(), threading.Event(), threading.Event()
        self._last = last

    def write(self, text: str) -> int:
        self.entered.set()
        self.released.wait(30)
        written = super().write(text)
        if text == self._last:
            self.drained.set()
        return written


class BrokenStream(io.StringIO):
    """A pipe whose reader is gone."""

    num_writes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        raise BrokenPipeError(32, "Broken pipe")


def test_all_that_was_written_is_there_after_close_and_in_order() -> None:
    stream = io.StringIO()
    writer = TextWriter(stream)
    for number in range(100):
        writer.write(f"{number}\n")
    writer.close()
    assert stream.getvalue().split() == [str(number) for number in range(100)]


def test_a_blocked_stream_blocks_nobody_and_the_dropped_messages_are_counted() -> None:
    stream = BlockedStream()
    writer = TextWriter(stream, max_pending=3)
    writer.write("first\n")
    assert stream.entered.wait(30)
    for number in range(10):
        writer.write(f"{number}\n")
    writer.close(deadline_s=0.0)
    assert stream.getvalue() == ""
    stream.released.set()


def test_dropped_messages_are_reported_once_the_reader_goes_on() -> None:
    stream = BlockedStream(last="1\n")
    writer = TextWriter(stream, max_pending=2)
    writer.write("first\n")
    assert stream.entered.wait(30)
    for number in range(5):
        writer.write(f"{number}\n")
    stream.released.set()
    assert stream.drained.wait(30)
    writer.write("next\n")
    writer.close(deadline_s=30)
    assert stream.getvalue() == "first\n0\n1\n(3 messages were dropped: nobody read them)\nnext\n"


def test_a_broken_stream_is_tried_once_and_then_left_alone() -> None:
    stream = BrokenStream()
    writer = TextWriter(stream)
    for _ in range(5):
        writer.write("text\n")
    writer.close()
    assert stream.num_writes == 1


def test_characters_that_the_encoding_lacks_become_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    writer = TextWriter(stream)
    writer.write("0.37 → 0.82\n")
    writer.close()
    assert raw.getvalue() == b"0.37 ? 0.82\n"


def test_closing_twice_and_writing_after_it_do_nothing() -> None:
    stream = io.StringIO()
    writer = TextWriter(stream)
    writer.close()
    writer.close()
    writer.write("late\n")
    assert stream.getvalue() == ""
