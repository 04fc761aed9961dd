"""Damages valid files, always in the same way for the same seed: bytes of any file, and the tree of one that is JSON.

Knows no reader. `Damage(seed, number)` is one case; what it does follows from these two alone.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

_NUMBERS = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
_PIECES = (
    *(
        b"",
        b"\0",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\r",
        b"\n",
        b"\r\n",
        b'"',
        b"'",
        b",",
        b";",
        b"\t",
        b"{",
        b"}",
        b"[",
    ),
    *(
        b"]",
        b":",
        b"\\",
        b"\\ud800",
        b"\\u0000",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"null",
        b"\xc3\x28",
        b"\xed\xa0\x80",
    ),
    *(
        b"9" * 400,
        b"9" * 5000,
        b"[" * 3000,
        b'{"a":' * 3000,
        b'"' + b"x" * 70000 + b'"',
        "\u2028".encode(),
        b"../../",
    ),
)


class Damage:
    """One case of damage."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = Random(f"{seed}:{number}")

    def raw(self, data: bytes, other: bytes = b"") -> bytes:
        """The data with one to four faults; `other` is another valid file, to put pieces of into it."""
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            data = self._once(bytearray(data), other or data)
        return data

    def _once(self, data: bytearray, other: bytes) -> bytes:
        random, size = self.random, len(data)
        # Headers are small and decide much: half of the faults are there.
        start = random.randrange(min(size, 200) if random.random() < 0.5 else size) if size else 0
        span = min(size - start, random.choice((1, 2, 4, 8, 64, 1024)))
        kind = random.randrange(9)
        if kind == 0 and size:
            data[start] ^= 1 << random.randrange(8)
        elif kind == 1:
            del data[start:]
        elif kind == 2:
            del data[start : start + span]
        elif kind == 3:
            data[start:start] = random.choice(_PIECES)
        elif kind == 4:
            data[start : start + span] = random.randbytes(span)
        elif kind == 5:
            width = random.choice((1, 2, 4, 8))
            value = random.choice(_NUMBERS) & ((1 << 8 * width) - 1)
            data[start : start + width] = value.to_bytes(width, random.choice(("little", "big")))
        elif kind == 6:
            data[start:start] = data[start : start + span] * random.choice((1, 2, 50))
        elif kind == 7:
            data[start : start + span] = bytes(span)
        else:
            from_other = random.randrange(len(other) + 1)
            data[start:] = other[from_other:]
        return bytes(data)

    def tree(self, value: Any) -> Any:
        """A copy of what JSON holds, with one to three values replaced, left out, doubled or renamed."""
        value = json.loads(json.dumps(value))
        for _ in range(self.random.choice((1, 1, 2, 3))):
            value = self._branch(value)
        return value

    def _branch(self, value: Any) -> Any:
        random = self.random
        if isinstance(value, dict) and value and random.random() < 0.85:
            key = random.choice(list(value))
            kind = random.randrange(6)
            if kind == 0:
                del value[key]
            elif kind == 1:
                value[random.choice((key.upper(), key + " ", "", "\ud800", "__class__", "é" * 300))] = (
                    value.pop(key)
                )
            else:
                value[key] = self._branch(value[key])
            return value
        if isinstance(value, list) and value and random.random() < 0.85:
            at = random.randrange(len(value))
            kind = random.randrange(6)
            if kind == 0:
                del value[at]
            elif kind == 1:
                value.insert(at, value[at])
            else:
                value[at] = self._branch(value[at])
            return value
        return self._odd(value)

    def _odd(self, value: Any) -> Any:
        nested: Any = 1
        for _ in range(self.random.choice((20, 300))):
            nested = [nested]
        return self.random.choice(
            (
                *(
                    None,
                    True,
                    False,
                    0,
                    -1,
                    1,
                    7,
                    2**31,
                    2**63,
                    10**30,
                    0.5,
                    -0.0,
                    1e308,
                    float("nan"),
                    float("inf"),
                ),
                *(
                    "",
                    " ",
                    "x",
                    "\ud800",
                    "\0",
                    "a\0b",
                    "../../etc/passwd",
                    "/etc/passwd",
                    "~/x",
                    "<image>",
                    "{{ 1 }}",
                ),
                *(
                    "9" * 5000,
                    "é" * 3000,
                    "[1, 2",
                    '{"a": 1}',
                    [],
                    {},
                    [[]],
                    [None],
                    [{}],
                    {"": None},
                    {"a": {"b": 1}},
                ),
                *(nested, [value, value], {"value": value}, str(value)[:1000]),
            )
        )

    def as_json(self, value: Any) -> bytes:
        """The value as JSON text, now and then with bytes damaged as well."""
        text = json.dumps(value, ensure_ascii=self.random.random() < 0.5).encode("utf-8", "surrogatepass")
        return self.raw(text) if self.random.random() < 0.2 else text
