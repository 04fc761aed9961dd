"""Runs a Python file as on a kernel, or in a container, that refuses some calls: `kernel_without.py 272,444 FILE`.

Not a test: it is how tests see what the sandbox does where there are no namespaces or no Landlock. The calls are
numbers of this machine's table; each is answered with "not permitted", as by a container's own filter.
"""

from __future__ import annotations

import ctypes
import runpy
import struct
import sys


def refuse(numbers: list[int]) -> None:
    steps = [(0x20, 0, 0, 0), *(s for n in numbers for s in ((0x15, 0, 1, n), (0x06, 0, 0, 0x00050001)))]
    steps.append((0x06, 0, 0, 0x7FFF0000))
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)
    whole = struct.pack("HP", len(steps), ctypes.addressof(packed))
    assert libc.prctl(22, 2, ctypes.c_char_p(whole), 0, 0) == 0


if __name__ == "__main__":
    refuse([int(number) for number in sys.argv[1].split(",")])
    del sys.argv[0]
    runpy.run_path(sys.argv[1], run_name="__main__")
