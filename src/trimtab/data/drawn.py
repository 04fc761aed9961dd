"""Pictures that Trimtab draws itself, each with a question and its answer: coloured shapes, and bar charts.

All of it follows from the seed in whole numbers: no font, no smoothed edge and no drawing routine of a library, so that
every processor and every release of Pillow shows the same pixels. Nothing is read from a file or downloaded.
Whether a picture is trained on or held out is settled by what stands in it (the shapes with their colours and places;
the bars with their colours and heights): the two sides share no picture, nor one that differs by a few pixels, whatever
seeds they have.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from trimtab.data.pictures import Picture, PictureRow, asked

Split = Literal["train", "eval"]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]

SIZE = 64
"""Pixels of a picture's side. Shapes stand in its quarters."""
COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 150, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 205, 40),
    "purple": (150, 60, 190),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")
COUNTS = ("2", "3", "4", "5")
"""How many bars a chart has, as it is answered."""

_PAPER, _AXIS = (255, 255, 255), (150, 150, 150)
_HALF = SIZE // 2
_SIDES = range(22, 28)
"""How wide a shape is."""
_OFF = 2
"""By how many pixels it may stand off the middle of its quarter."""
_LEVELS = range(6)
"""Bars of one chart differ in height by five pixels at least."""
_HELD = 32
"""Of 256: the share of what can be drawn that is held out, one in eight."""


@dataclass(frozen=True)
class Thing:
    """A shape, and the square of pixels that it fills."""

    shape: str
    colour: str
    place: str
    left: int
    top: int
    side: int

    @property
    def look(self) -> str:
        return f"{self.shape} {self.colour} {self.place}"

    def draw(self, pixels: Pixels) -> None:
        square = pixels[self.top : self.top + self.side, self.left : self.left + self.side]
        square[_filled(self.shape, self.side)] = COLOURS[self.colour]


@dataclass(frozen=True)
class Bar:
    """A bar of a chart."""

    colour: str
    level: int
    height: int
    left: int

    @property
    def look(self) -> str:
        return f"bar {self.colour} {self.level} {self.left}"

    def draw(self, pixels: Pixels) -> None:
        foot = SIZE - 4
        pixels[foot : foot + 2, 2 : SIZE - 2] = _AXIS
        pixels[foot - self.height : foot, self.left : self.left + 8] = COLOURS[self.colour]


Scene = Sequence[Thing] | Sequence[Bar]
Ask = Callable[[random.Random, str], tuple[Scene, str]]
"""A scene and a question to which the given answer is right."""


def drawn_rows(split: Split, number: int, seed: int) -> list[PictureRow]:
    """So many rows, each with a picture of its own; every kind of question, and every answer to it, equally often."""
    seen: set[bytes] = set()
    made = [_row(split, place, seed, seen) for place in range(number)]
    random.Random(f"{seed} {split}").shuffle(made)
    return made


def _row(split: Split, place: int, seed: int, seen: set[bytes]) -> PictureRow:
    kinds = list(KINDS.values())
    ask, answers = kinds[place % len(kinds)]
    answer = answers[place // len(kinds) % len(answers)]
    chance = random.Random(f"{seed} {split} {place}")
    where = f"drawn-pictures ({split}), picture {place + 1}"
    while True:
        scene, question = ask(chance, answer)
        if held_out(scene) != (split == "eval"):
            continue
        pixels = draw(scene)
        if (known := pixels.tobytes()) not in seen:
            seen.add(known)
            return asked(question, (answer,), (Picture(_png(pixels), where),), where)


def held_out(scene: Scene) -> bool:
    """Whether pictures of this are kept from training."""
    looks = "; ".join(sorted(part.look for part in scene))
    return hashlib.sha256(looks.encode()).digest()[0] < _HELD


def draw(scene: Scene) -> Pixels:
    """The picture, height × width × RGB."""
    pixels = np.full((SIZE, SIZE, 3), _PAPER, np.uint8)
    for part in scene:
        part.draw(pixels)
    return pixels


def _png(pixels: Pixels) -> bytes:
    from PIL import Image

    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "PNG", compress_level=1)
    return held.getvalue()


@cache
def _filled(shape: str, side: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which pixels of its square a shape fills; twice the distance from the middle is a whole number."""
    y, x = np.mgrid[:side, :side]
    across, down = np.abs(2 * x - side + 1), np.abs(2 * y - side + 1)
    if shape == "circle":
        return np.asarray(across**2 + down**2 <= side**2)
    if shape == "triangle":
        return np.asarray(across <= y + 1)
    if shape == "cross":
        return np.asarray((across <= side // 5) | (down <= side // 5))
    return np.ones((side, side), bool)


def _some(
    chance: random.Random, choices: Sequence[str], number: int, first: str | None = None
) -> Sequence[str]:
    """Different ones, the given one before the others."""
    if first is None:
        return chance.sample(choices, number)
    return [first, *chance.sample([choice for choice in choices if choice != first], number - 1)]


def _things(
    chance: random.Random, *, shape: str | None = None, colour: str | None = None, place: str | None = None
) -> list[Thing]:
    """Two or three shapes, no two alike in anything; the first is what is asked about."""
    number = chance.choice((2, 3))
    shapes = _some(chance, SHAPES, number, shape)
    colours = _some(chance, list(COLOURS), number, colour)
    places = _some(chance, PLACES, number, place)
    things = []
    for own_shape, own_colour, own_place in zip(shapes, colours, places, strict=True):
        side = chance.choice(_SIDES)
        left, top = ((_HALF - side) // 2 + chance.randint(-_OFF, _OFF) for _ in range(2))
        left += _HALF * own_place.endswith("right")
        top += _HALF * own_place.startswith("bottom")
        things.append(Thing(own_shape, own_colour, own_place, left, top, side))
    return things


def _bars(chance: random.Random, number: int, tallest: str | None = None) -> list[Bar]:
    """Bars from left to right, no two of one colour or height."""
    levels = chance.sample(_LEVELS, number)
    rest = list(_some(chance, list(COLOURS), number, tallest))
    first = rest.pop(0)
    bars = []
    for place, level in enumerate(levels):
        colour = first if level == max(levels) else rest.pop()
        bars.append(Bar(colour, level, 8 + 8 * level + chance.randrange(4), 4 + 12 * place))
    return bars


def _ask_colour(chance: random.Random, answer: str) -> tuple[Scene, str]:
    things = _things(chance, colour=answer)
    return things, f"What colour is the shape at the {things[0].place}?"


def _ask_shape(chance: random.Random, answer: str) -> tuple[Scene, str]:
    things = _things(chance, shape=answer)
    return things, f"Which shape is at the {things[0].place}?"


def _ask_place(chance: random.Random, answer: str) -> tuple[Scene, str]:
    things = _things(chance, place=answer)
    return things, f"Where is the {things[0].colour} shape?"


def _ask_tallest(chance: random.Random, answer: str) -> tuple[Scene, str]:
    return _bars(chance, int(chance.choice(COUNTS)), answer), "Which bar is the tallest?"


def _ask_number(chance: random.Random, answer: str) -> tuple[Scene, str]:
    return _bars(chance, int(answer)), "How many bars are there?"


KINDS: dict[str, tuple[Ask, Sequence[str]]] = {
    "colour": (_ask_colour, tuple(COLOURS)),
    "shape": (_ask_shape, SHAPES),
    "place": (_ask_place, PLACES),
    "tallest": (_ask_tallest, tuple(COLOURS)),
    "number": (_ask_number, COUNTS),
}
"""The kinds of question, with their answers: four at least, so that a guess is right one time in four at most."""
