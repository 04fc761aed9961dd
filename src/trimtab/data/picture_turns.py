"""Conversations with pictures, of every spelling, as messages whose content is a list of parts.

OpenAI's parts (`image_url`), Hugging Face's ({"type": "image", "image" | "path" | "url"}), bare {"type": "image"} with
the pictures in a column beside, and LLaVA's `<image>` inside the text. Opens no picture. As many pictures as places
for them, or the row is a bad one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.data.clean import BadRow, Tally, text_of
from trimtab.data.convert import ROLES
from trimtab.data.formats import parse_list
from trimtab.data.picture_values import picture_of
from trimtab.data.pictures import Message, Picture, PictureRow
from trimtab.data.read import Row

PLACE = "<image>"
"""Where a picture stands in a text, as LLaVA's files have it."""

_TEXT_KINDS = ("text", "input_text", "output_text")
_PICTURE_KINDS = ("image", "image_url", "input_image")
_SOURCES = ("image", "image_url", "path", "url", "base64", "bytes", "data")


def conversation(
    value: Any, name: str, beside: tuple[Picture, ...] | None, row: Row, tally: Tally, marked: bool
) -> PictureRow:
    """The row that a list of messages makes. `beside` are the pictures of a column of their own, None without one.

    `marked` says that `<image>` in a text is always a picture's place (LLaVA); else only where there is such a column.
    """
    turns = parse_list(value)
    if not isinstance(turns, list):
        raise BadRow(f"`{name}` is {'null' if turns is None else 'not a list of messages'}")
    waiting = list(beside or ())
    pictures: list[Picture] = []
    messages: list[Message] = []
    places = 0
    for turn in turns:
        role, content = _role_and_content(turn, name)
        parts: list[Message] = []
        for kind, held in _parts(content, name, marked or beside is not None, tally):
            if kind == "text":
                parts.append({"type": "text", "text": held})
                continue
            if role == "assistant":
                raise BadRow(f"a picture inside an answer in `{name}`")
            parts.append({"type": "image"})
            if held is not None:
                pictures.append(picture_of(held, name, row, tally))
                continue
            places += 1
            if waiting:
                pictures.append(waiting.pop(0))
        parts = _trimmed(parts)
        if not parts and role != "system":
            raise BadRow("empty answer" if role == "assistant" else "empty user message")
        if parts:
            messages.append({"role": role, "content": parts})
    made = _up_to_last_answer(messages, pictures, row, tally)
    if places != len(beside or ()):
        raise BadRow(f"places for pictures in `{name}`: {places}; pictures beside it: {len(beside or ())}")
    return made


def _role_and_content(turn: Any, name: str) -> tuple[str, Any]:
    if not isinstance(turn, Mapping):
        raise BadRow(f"`{name}` holds a {type(turn).__name__} where a message should be")
    said = turn.get("role") or turn.get("from")
    if said is None:
        raise BadRow(f"a message in `{name}` has no role")
    role = ROLES.get(str(said).lower())
    if role not in ("system", "user", "assistant"):
        raise BadRow(
            f"a message of the role `{said}` in `{name}`; rows with pictures have system, user, assistant"
        )
    if turn.get("weight") == 0 or turn.get("tool_calls"):
        raise BadRow(f"`weight: 0` or `tool_calls` in `{name}`, which rows with pictures do not have")
    content = turn.get("content")
    return role, turn.get("value") if content is None else content


def _parts(content: Any, name: str, marked: bool, tally: Tally) -> list[tuple[str, Any]]:
    """(`text`, the text) and (`image`, its value, or None for one beside), in order."""
    if not isinstance(content, list):
        return _split(text_of(content, name, tally), marked)
    found: list[tuple[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise BadRow(f"`{name}` holds a content part that is a {type(part).__name__}")
        part = {key: held for key, held in part.items() if held is not None}  # Parquet fills in nulls
        kind = part.get("type") or ("text" if "text" in part else "image")
        if kind in _TEXT_KINDS:
            found += _split(text_of(part.get("text"), name, tally), marked=False)
        elif kind in _PICTURE_KINDS:
            found.append(("image", next((part[key] for key in _SOURCES if key in part), None)))
        else:
            raise BadRow(f"`{name}` holds a content part of kind {kind}; Trimtab knows text and image")
    return found


def _split(text: str, marked: bool) -> list[tuple[str, Any]]:
    """A text, cut where pictures stand in it; the line ends around a picture's place belong to the place."""
    if not marked or PLACE not in text:
        return [("text", text)] if text else []
    pieces = text.split(PLACE)
    found: list[tuple[str, Any]] = []
    for number, piece in enumerate(pieces):
        if number:
            found.append(("image", None))
            piece = piece.removeprefix("\n")
        if number < len(pieces) - 1:
            piece = piece.removesuffix("\n")
        if piece.strip():
            found.append(("text", piece))
    return found


def _trimmed(parts: list[Message]) -> list[Message]:
    """No parts at all where nothing but blank text is in them."""
    return parts if any(part["type"] == "image" or part["text"].strip() for part in parts) else []


def _up_to_last_answer(
    messages: list[Message], pictures: list[Picture], row: Row, tally: Tally
) -> PictureRow:
    answered = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not answered:
        raise BadRow("no answer (no assistant message to train on)")
    kept = messages[: answered[-1] + 1]
    if all(message["role"] != "user" for message in kept):
        raise BadRow("no user message before the answer")
    if len(kept) < len(messages):
        tally.change("conversation cut after its last answer")
    shown = sum(part["type"] == "image" for message in kept for part in message["content"])
    answer = "".join(part["text"] for part in kept[-1]["content"]).strip()
    return PictureRow(tuple(kept), tuple(pictures[:shown]), (answer,), row.where)
