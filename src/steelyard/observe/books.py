"""Whether the books of a run close, and the lines that show it."""

import msgspec

from steelyard.observe.rows import BooksRow, PromptBook, TokenBook
from steelyard.observe.wording import integer, words


class BookLine(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a book. ``is_reason``: a part of the entry above it, by reason."""

    name: str
    count: int
    is_reason: bool = False


class BookTable(msgspec.Struct, frozen=True, kw_only=True):
    """One book: ``total`` on the left side, ``lines`` on the right, ``gap = total - sum`` of the main lines."""

    name: str
    total_name: str
    total: int
    lines: tuple[BookLine, ...]
    gap: int

    @property
    def closes(self) -> bool:
        """Both sides are equal."""
        return self.gap == 0

    @property
    def verdict(self) -> str:
        """The state of the book as a sentence."""
        if self.closes:
            return "closes"
        how = "unaccounted for" if self.gap > 0 else "counted twice"
        return f"does not close: {integer(abs(self.gap))} {self.name} {how}"


def prompt_table(book: PromptBook) -> BookTable:
    """``issued = trained + dropped + live``, counted in groups of rollouts, one for each prompt."""
    lines = (
        BookLine(name="trained", count=book.trained),
        *_with_reasons("dropped", book.dropped),
        BookLine(name="live", count=book.live),
    )
    return _table("prompts", "issued", book.issued, lines)


def token_table(book: TokenBook) -> BookTable:
    """``recorded = trained + evaluated + rejected + in flight + lost``, in sampled tokens."""
    lines = (
        BookLine(name="trained", count=book.trained),
        BookLine(name="evaluated", count=book.evaluated),
        *_with_reasons("rejected", book.rejected),
        BookLine(name="in flight", count=book.in_flight),
        *_with_reasons("lost", book.lost),
    )
    return _table("tokens", "recorded", book.recorded, lines)


def open_books(row: BooksRow) -> list[str]:
    """A sentence for each book that does not close."""
    tables = (prompt_table(row.prompts), token_table(row.tokens))
    return [f"the book of {table.name} {table.verdict}" for table in tables if not table.closes]


def _table(name: str, total_name: str, total: int, lines: tuple[BookLine, ...]) -> BookTable:
    right = sum(line.count for line in lines if not line.is_reason)
    return BookTable(name=name, total_name=total_name, total=total, lines=lines, gap=total - right)


def _with_reasons(name: str, counts: dict[str, int]) -> tuple[BookLine, ...]:
    reasons = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return (
        BookLine(name=name, count=sum(counts.values())),
        *(BookLine(name=words(reason), count=count, is_reason=True) for reason, count in reasons if count),
    )
