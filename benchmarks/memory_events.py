"""Where a rehearsal's allocations and releases part from a GPU's: the order of both, of the same case, side by side.

What is reserved hangs on that order, and a peak that agrees does not show it.

    python benchmarks/memory_events.py CASE --out real.json.gz                # on a GPU
    python benchmarks/memory_events.py CASE --virtual --out virtual.json.gz   # anywhere: on a virtual H200, shapes only
    python benchmarks/memory_events.py compare real.json.gz virtual.json.gz   # the first stretches that differ
    python benchmarks/memory_events.py peak real.json.gz                      # what is there when most is allocated
    python benchmarks/memory_events.py replay real.json.gz                    # the GPU's requests, by our allocator

A case is a script, or a JSON file of `memory_newcomers` and its like, which goes through `trimtab train`. All blocks
are kept, each as its bytes, below nought where it is given back; `compare` tells those of 1 MiB and more.
"""

from __future__ import annotations

import argparse
import collections
import difflib
import gzip
import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
LEAST = 1 << 20
FRAMES = 6


class Events:
    """What was asked for and given back, and the segments that were reserved for it, in order."""

    def __init__(self) -> None:
        self.where: dict[str, int] = {}
        """The lines of Python below which something was asked for, innermost first."""
        self.deeds: list[tuple[str, int, int, int]] = []
        """What was done (`+` `-` of a block, `S` `R` of a segment), to which block, its bytes, and where."""
        self.segments: list[tuple[int, int, list[int], int]] = []
        """Those that are there at the end: where they begin, their bytes, their pool and their stream."""

    def add(self, deed: str, block: int, nbytes: int, lines: list[str]) -> None:
        place = self.where.setdefault(" < ".join(lines), len(self.where))
        self.deeds.append((deed, block, nbytes, place))

    def save(self, path: Path) -> None:
        told = {"where": list(self.where), "deeds": self.deeds, "segments": self.segments}
        path.write_bytes(gzip.compress(json.dumps(told, separators=(",", ":")).encode()))

    @classmethod
    def load(cls, name: str) -> Events:
        told = json.loads(gzip.decompress(Path(name).read_bytes()))
        read = cls()
        read.where = {lines: place for place, lines in enumerate(told["where"])}
        read.deeds = [tuple(deed) for deed in told["deeds"]]
        read.segments = [tuple(segment) for segment in told["segments"]]
        return read

    def blocks(self) -> list[tuple[int, str]]:
        """Blocks of 1 MiB and more as they come and go, rounded as the allocator does."""
        lines = list(self.where)
        return [
            (taken if deed == "+" else -taken, lines[place])
            for deed, _, nbytes, place in self.deeds
            if deed in "+-" and (taken := -(-nbytes // 512) * 512) >= LEAST
        ]


@contextmanager
def on_hardware(events: Events) -> Iterator[None]:
    """torch's own history of its allocator."""
    import torch

    memory = torch.cuda.memory
    # At its own time: a program may fork before it uses a GPU.
    torch.cuda._lazy_call(
        lambda: memory._record_memory_history(context="alloc", stacks="python", max_entries=10_000_000)
    )
    try:
        yield
    finally:
        for figure in ("max_memory_allocated", "max_memory_reserved"):
            print(figure, getattr(memory, figure)(), flush=True)
        deeds = {"alloc": "+", "free_requested": "-", "segment_alloc": "S", "segment_free": "R"}
        snapshot = memory._snapshot()
        for one in snapshot["segments"]:
            pool = list(one.get("segment_pool_id", (0, 0)))
            events.segments.append((one["address"], one["total_size"], pool, one["stream"]))
        for entry in snapshot["device_traces"][0]:
            if deed := deeds.get(entry["action"]):
                frames = entry.get("frames", ())[:FRAMES] if deed == "+" else ()
                lines = [f"{Path(f['filename']).name}:{f['line']}" for f in frames]
                events.add(deed, entry["addr"], entry["size"], lines)


@contextmanager
def on_a_virtual_one(events: Events) -> Iterator[None]:
    """Every block of a virtual GPU that is in force, as it comes and goes."""
    import torch  # noqa: F401  the machine comes into force with it

    from trimtab.virtual import memory, origin, state

    made, gone = memory.Block.__init__, memory.Block.__del__

    def note(block: memory.Block, deed: str) -> None:
        machine = state.machine()
        if machine is not None and block.device is machine.at(0):  # none of those on which things are tried
            frames = origin.stack(2)[:FRAMES] if deed == "+" else ()
            lines = [f"{Path(frame.file).name}:{frame.line}" for frame, _ in frames]
            events.add(deed, id(block), block.nbytes, lines)

    def init(block: memory.Block, device: object, nbytes: int) -> None:
        made(block, device, nbytes)  # type: ignore[arg-type]
        note(block, "+")

    def delete(block: memory.Block) -> None:
        note(block, "-")
        gone(block)

    memory.Block.__init__, memory.Block.__del__ = init, delete  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        memory.Block.__init__, memory.Block.__del__ = made, gone  # type: ignore[method-assign]


def carry_out(program: str) -> None:
    """A script, or `trimtab train` of a config."""
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
        return
    from trimtab.cli import main as trimtab

    sys.argv = ["trimtab", "train", program]
    try:
        trimtab()
    except SystemExit as end:
        if end.code:
            raise


def record(case: Path, out: Path, *, virtual: bool) -> None:
    """The events of a case, in a file."""
    with tempfile.TemporaryDirectory(prefix="memory-events-") as scratch:
        program = case.resolve()
        if case.suffix == ".json":
            sys.path.insert(0, str(HERE / "memory_strangers"))
            from stage import stage

            program = stage(Path(scratch), case, weights=not virtual)
        if virtual:
            words = [__file__, str(program), "--inside", "--out", str(out.resolve())]
            line = [
                sys.executable,
                "-m",
                "trimtab",
                "rehearse",
                "--shapes-only",
                "--in-place",
                "--gpus",
                "H200",
            ]
            subprocess.run([*line, *words], cwd=scratch, check=False)
            return
        watch(program, out, on_hardware)


def watch(program: Path, out: Path, how: object) -> None:
    events = Events()
    try:
        with how(events):  # type: ignore[operator]
            carry_out(str(program))
    finally:
        events.save(out)


def compare(real: Events, virtual: Events, most: int) -> None:
    """Print the stretches in which the two differ, with what stands around them."""
    ours, theirs = virtual.blocks(), real.blocks()
    sizes = [[size for size, _ in blocks] for blocks in (theirs, ours)]
    found = 0
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *sizes, autojunk=False).get_opcodes():
        if kind != "equal" and found < most:
            found += 1
            print(f"-- {kind}: on the GPU {a} to {b}, virtual {c} to {d}")
            for name, blocks, first, last in (("GPU    ", theirs, a, b), ("virtual", ours, c, d)):
                for size, where in blocks[max(0, first - 1) : last + 1][:12]:
                    print(f"   {name} {size / 2**20:+10.1f} MiB  {where}")
    print(f"{len(theirs)} events on the GPU, {len(ours)} virtual; {found or 'no'} differing stretches told")


def peak(events: Events, most: int) -> None:
    """Print what is there when most is allocated, by the lines that asked for it."""
    lines, live, now, top, at = list(events.where), {}, 0, 0, 0
    for number, (deed, _, nbytes, _) in enumerate(events.deeds):
        if deed in "+-":
            now += (1 if deed == "+" else -1) * -(-nbytes // 512) * 512
            if now > top:
                top, at = now, number
    for deed, block, nbytes, place in events.deeds[: at + 1]:
        if deed == "+":
            live[block] = (-(-nbytes // 512) * 512, lines[place])
        elif deed == "-":
            live.pop(block, None)
    together: dict[tuple[int, str], int] = collections.Counter(live.values())
    print(f"{top / 2**20:.1f} MiB after event {at} of {len(events.deeds)}")
    for (size, where), number in sorted(together.items(), key=lambda one: -one[0][0] * one[1])[:most]:
        print(f"{size * number / 2**20:10.1f} MiB = {number} x {size / 2**20:.2f}  {where}")


def replay(events: Events) -> None:
    """What our allocator makes of the requests of a GPU, beside what the GPU reserved."""
    from trimtab.virtual import virtual_gpus
    from trimtab.virtual.memory import Block
    from trimtab.virtual.state import machine

    reserved = most = 0
    with virtual_gpus(1, memory=150_754_820_096, name="NVIDIA H200", capability=(9, 0), shapes=True):
        import torch

        torch.cuda.init()
        device, live = machine().at(0), {}  # type: ignore[union-attr]
        for deed, block, nbytes, _ in events.deeds:
            if deed == "+":
                live[block] = Block(device, nbytes)
            elif deed == "-":
                live.pop(block, None)
            else:
                reserved += nbytes if deed == "S" else -nbytes
                most = max(most, reserved)
        told = torch.cuda.max_memory_reserved()
    print(f"reserved on the GPU {most}, by our allocator {told}: {told / most - 1:+.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", help="a case; or compare, peak, replay and their files")
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--inside", action="store_true", help="of a rehearsal, which --virtual starts")
    parser.add_argument("--out", type=Path, default=Path("events.json.gz"))
    parser.add_argument("--most", type=int, default=20, help="stretches or lines that are told")
    asked = parser.parse_args()
    if asked.words[0] == "compare":
        compare(*map(Events.load, asked.words[1:]), asked.most)
    elif asked.words[0] == "peak":
        peak(Events.load(asked.words[1]), asked.most)
    elif asked.words[0] == "replay":
        replay(Events.load(asked.words[1]))
    elif asked.inside:
        watch(Path(asked.words[0]), asked.out, on_a_virtual_one)
    else:
        record(Path(asked.words[0]), asked.out, virtual=asked.virtual)


if __name__ == "__main__":
    main()
