"""Where a rehearsal's allocations and releases part from a GPU's: the order of both, of the same program, side by side.

What is reserved hangs on that order, and a peak that agrees does not show it.

    python benchmarks/memory_events.py SCRIPT --out real.json                # on a GPU
    python benchmarks/memory_events.py SCRIPT --virtual --out virtual.json   # anywhere: on a virtual H200, shapes only
    python benchmarks/memory_events.py compare real.json virtual.json        # the first stretches that differ

Only blocks of 1 MiB and more are told, each as its bytes, below nought where it is given back.
"""

from __future__ import annotations

import argparse
import difflib
import json
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

LEAST = 1 << 20
Events = list[tuple[int, str]]
"""Bytes, and the lines of Python below which they were asked for."""


@contextmanager
def on_hardware(events: Events) -> Iterator[None]:
    """torch's own history of its allocator."""
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=10_000_000, stacks="python")
    try:
        yield
    finally:
        for entry in memory._snapshot()["device_traces"][0]:
            sign = {"alloc": 1, "free_requested": -1}.get(entry["action"], 0)
            if sign and entry["size"] >= LEAST:
                lines = [f"{Path(f['filename']).name}:{f['line']}" for f in entry.get("frames", ())[:4]]
                events.append((sign * entry["size"], " < ".join(lines)))


@contextmanager
def on_a_virtual_one(events: Events) -> Iterator[None]:
    """Every block of a virtual H200, as it comes and goes; rounded as the allocator does."""
    from trimtab.virtual import memory, origin, virtual_gpus

    made, gone = memory.Block.__init__, memory.Block.__del__

    def note(block: memory.Block, sign: int) -> None:
        taken = -(-block.nbytes // 512) * 512
        if taken >= LEAST and block.device.index == 0:
            lines = [f"{Path(frame.file).name}:{frame.line}" for frame, _ in origin.stack(2)[:4]]
            events.append((sign * taken, " < ".join(lines)))

    def init(block: memory.Block, device: object, nbytes: int) -> None:
        made(block, device, nbytes)  # type: ignore[arg-type]
        note(block, 1)

    def delete(block: memory.Block) -> None:
        note(block, -1)
        gone(block)

    with virtual_gpus(1, memory=150_754_820_096, name="NVIDIA H200", capability=(9, 0), shapes=True):
        memory.Block.__init__, memory.Block.__del__ = init, delete  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            memory.Block.__init__, memory.Block.__del__ = made, gone  # type: ignore[method-assign]


def compare(real: Events, virtual: Events, most: int) -> None:
    """Print the stretches in which the two differ, with what stands around them."""
    pairs = [[size for size, _ in events] for events in (real, virtual)]
    found = 0
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *pairs, autojunk=False).get_opcodes():
        if kind != "equal" and found < most:
            found += 1
            print(f"-- {kind}: on the GPU {a} to {b}, virtual {c} to {d}")
            for name, events, first, last in (("GPU    ", real, a, b), ("virtual", virtual, c, d)):
                for size, where in events[max(0, first - 1) : last + 1][:12]:
                    print(f"   {name} {size / 2**20:+10.1f} MiB  {where}")
    print(f"{len(real)} events on the GPU, {len(virtual)} virtual; {found or 'no'} differing stretches told")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", help="a script; or compare and two files")
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("events.json"))
    parser.add_argument("--most", type=int, default=20, help="stretches that are told")
    asked = parser.parse_args()
    if asked.words[0] == "compare":
        real, virtual = (json.loads(Path(name).read_text()) for name in asked.words[1:])
        compare(real, virtual, asked.most)
        return
    events: Events = []
    with on_a_virtual_one(events) if asked.virtual else on_hardware(events):
        runpy.run_path(asked.words[0], run_name="__main__")
    asked.out.write_text(json.dumps(events))


if __name__ == "__main__":
    main()
