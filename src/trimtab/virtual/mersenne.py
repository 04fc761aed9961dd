"""The CPU's generator set forward by any number of draws, as if they had been made: billions in a tenth of a second.

MT19937 is linear over bits: its state after n draws is the remainder of x^n by its characteristic polynomial, applied
to the state now. A polynomial is a whole number here, bit i the coefficient of x^i.
"""

from __future__ import annotations

import functools

import torch

from trimtab.virtual.held_modes import past_dispatch

_Native = torch._C.Generator

_WORDS, _MIDDLE, _DEGREE = 624, 397, 19937
_UPPER, _LOWER, _TWIST = 0x80000000, 0x7FFFFFFF, 0x9908B0DF
_DRAWN = 1 << 23
"""Up to so many numbers are drawn one by one."""
_AT_ONCE = 1 << 16
_ROWS = 256
_LEFT, _FROM, _TO = slice(8, 12), 24, 24 + 8 * _WORDS
"""Within the bytes that torch tells a generator's state in: what is left of its words, and these."""


def set_forward(generator: torch._C.Generator, draws: int) -> None:
    """Leave a generator of the CPU where it is after so many draws of 32 bits."""
    with past_dispatch(), torch._C.DisableTorchFunction():
        if draws > _DRAWN:
            left = int.from_bytes(_Native.get_state(generator)[_LEFT].numpy().tobytes(), "little")
            # To the end of words that were all made by the recurrence: the first ones come out of a seed.
            draws -= _draw(generator, left - 1 + _WORDS)
            _skip(generator, draws // _WORDS)
            draws %= _WORDS
        _draw(generator, draws)


def _draw(generator: torch._C.Generator, draws: int) -> int:
    into = torch.empty(min(draws, _AT_ONCE), dtype=torch.uint8, device="cpu")
    for _ in range(draws // _AT_ONCE):
        into.random_(generator=generator)
    into[: draws % _AT_ONCE].random_(generator=generator)
    return draws


def _skip(generator: torch._C.Generator, times: int) -> None:
    """Have all of its words, of which none is left, made anew so many times."""
    state = _Native.get_state(generator)
    held = state[_FROM:_TO].view(torch.int64)
    windows = _following(held, _DEGREE).unfold(0, _WORDS, 1)
    terms = bin(_remainder(times * _WORDS))[:1:-1].encode()
    taken = torch.frombuffer(bytearray(terms), dtype=torch.uint8).bitwise_and(1).nonzero().squeeze(1)
    sums = torch.zeros(_ROWS, _WORDS, dtype=torch.int64, device="cpu")
    for rows in taken.split(_ROWS):
        sums[: len(rows)] ^= windows[rows]
    while len(sums) > 1:
        sums = sums[::2] ^ sums[1::2]
    held.copy_(sums[0])
    _Native.set_state(generator, state)


def _following(words: torch.Tensor, count: int) -> torch.Tensor:
    """The words of a state and those that come after them."""
    made = torch.empty(_WORDS + count, dtype=torch.int64, device="cpu")
    made[:_WORDS] = words
    for at in range(_WORDS, len(made), _WORDS - _MIDDLE):
        end = min(at + _WORDS - _MIDDLE, len(made))
        far, near = made[at - _WORDS : end - _WORDS], made[at - _WORDS + 1 : end - _WORDS + 1]
        mixed = (far & _UPPER) | (near & _LOWER)
        middle = made[at - _WORDS + _MIDDLE : end - _WORDS + _MIDDLE]
        made[at:end] = middle ^ (mixed >> 1) ^ (mixed & 1) * _TWIST
    return made


@functools.lru_cache(16)
def _remainder(power: int) -> int:
    """Of x^power by the characteristic polynomial."""
    shift = max(0, power.bit_length() - _DEGREE.bit_length() + 1)
    found = 1 << (power >> shift)
    for bit in range(shift - 1, -1, -1):
        squared = int("0".join(bin(found)[2:]), 2)
        found = _reduced(squared << (power >> bit & 1))
    return found


def _reduced(value: int) -> int:
    lower = _lower_terms()
    while high := value >> _DEGREE:
        value ^= high << _DEGREE
        for exponent in lower:
            value ^= high << exponent
    return value


@functools.cache
def _lower_terms() -> tuple[int, ...]:
    """The exponents of the characteristic polynomial below its degree (Matsumoto and Nishimura 1998, appendix)."""
    word = (1 << _WORDS) ^ (1 << _MIDDLE)
    found = _product(word, _power(word >> 1, 31)) ^ 1
    for bit in range(31):
        if _TWIST >> bit & 1:
            found ^= _product(word, _power(word >> 1, 30 - bit))
    return tuple(exponent for exponent in range(_DEGREE) if found >> exponent & 1)


def _power(value: int, times: int) -> int:
    return functools.reduce(_product, [value] * times, 1)


def _product(left: int, right: int) -> int:
    found = 0
    for bit in range(right.bit_length()):
        if right >> bit & 1:
            found ^= left << bit
    return found
