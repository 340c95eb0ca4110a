"""A small terminal: interprets what a display writes and shows what a person would see."""

import io
import re

_PIECE = re.compile(r"\x1b\[(?P<args>[?0-9;]*)(?P<kind>[A-Za-z])|(?P<char>.)", re.DOTALL)


class Screen(io.TextIOWrapper):
    """``num_columns`` x ``num_rows`` of characters with a cursor, line wrap, scrolling and the control codes of ours.

    It can be handed to a display as its stream. An unknown control code is an error, so that a test notices it.
    """

    def __init__(self, num_columns: int, num_rows: int) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self.num_columns = num_columns
        self.num_rows = num_rows
        self._is_cursor_visible = True
        self.scrolled_off: list[str] = []
        self._rows = [""] * num_rows
        self._row = 0
        self._column = 0

    def write(self, text: str) -> int:
        """Interpret ``text``."""
        for piece in _PIECE.finditer(text):
            if piece["kind"]:
                self._control(piece["args"], piece["kind"])
            else:
                self._put(piece["char"])
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        """It is a terminal."""
        return True

    def shows_cursor(self) -> bool:
        """Whether the cursor can be seen."""
        return self._is_cursor_visible

    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        return self.num_columns, self.num_rows

    def lines(self) -> list[str]:
        """The visible lines without trailing blanks, up to the last that is not empty."""
        return "\n".join(row.rstrip() for row in self._rows).rstrip("\n").split("\n")

    def resize(self, num_columns: int, num_rows: int) -> None:
        """Wrap the lines anew, as terminals do, keeping the bottom and the cursor on its line."""
        wrapped: list[str] = []
        cursor = 0
        for index, row in enumerate(self._rows):
            if index == self._row:
                cursor = len(wrapped)
            text = row.rstrip()
            wrapped += [text[i : i + num_columns] for i in range(0, len(text), num_columns)] or [""]
        surplus = max(0, cursor + 1 - num_rows)
        self.scrolled_off += wrapped[:surplus]
        kept = wrapped[surplus : surplus + num_rows]
        self._rows = kept + [""] * (num_rows - len(kept))
        self._row, self._column = cursor - surplus, 0
        self.num_columns, self.num_rows = num_columns, num_rows

    def _put(self, char: str) -> None:
        if char == "\n":
            self._row, self._column = self._row + 1, 0
        elif char == "\r":
            self._column = 0
        else:
            if self._column >= self.num_columns:
                self._row, self._column = self._row + 1, 0
            self._scroll()
            row = self._rows[self._row].ljust(self._column)
            self._rows[self._row] = row[: self._column] + char + row[self._column + 1 :]
            self._column += 1
        self._scroll()

    def _scroll(self) -> None:
        while self._row >= self.num_rows:
            self.scrolled_off.append(self._rows.pop(0).rstrip())
            self._rows.append("")
            self._row -= 1

    def _control(self, args: str, kind: str) -> None:
        if kind in "hl" and args in ("?25", "?2026"):
            if args == "?25":
                self._is_cursor_visible = kind == "h"
        elif kind == "A":
            self._row = max(0, self._row - int(args or 1))
        elif kind == "H" and not args:
            self._row, self._column = 0, 0
        elif kind == "K" and not args:
            self._rows[self._row] = self._rows[self._row][: self._column]
        elif kind == "J" and args in ("", "2"):
            self._clear_below(0 if args == "2" else self._row)
        elif kind != "m":
            raise ValueError(f"the screen must know the control code, got {args}{kind}")

    def _clear_below(self, first: int) -> None:
        if first == self._row:
            self._rows[first] = self._rows[first][: self._column]
            first += 1
        for row in range(first, self.num_rows):
            self._rows[row] = ""
