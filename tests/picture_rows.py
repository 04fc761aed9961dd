"""Rows with pictures for tests: small pictures of plain forms, encoded as PNG, and conversations about them."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image, ImageDraw

from trimtab.data.pictures import Picture, PictureRow, asked


def drawn(width: int = 40, height: int = 20, colour: str = "red", where: str = "drawn") -> Picture:
    """A form of one colour on white."""
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).ellipse((2, 2, width - 3, height - 3), fill=colour)
    held = io.BytesIO()
    image.save(held, "PNG")
    return Picture(held.getvalue(), where)


def question(text: str, answer: str, *pictures: Picture, where: str = "rows.jsonl, line 1") -> PictureRow:
    return asked(text, (answer,), pictures, where)


def turns(
    *said: tuple[str, str], pictures: tuple[Picture, ...] = (), where: str = "rows.jsonl, line 2"
) -> Any:
    """A conversation: ("user", "<image>what?"), ("assistant", "that"), …; `<image>` stands before the text."""
    messages = []
    for role, text in said:
        parts: list[dict[str, str]] = [{"type": "image"}] * text.count("<image>")
        parts += [{"type": "text", "text": text.replace("<image>", "")}]
        messages.append({"role": role, "content": parts})
    return PictureRow(tuple(messages), pictures, (said[-1][1],), where)
