"""Whether the ranks agree: on each collective (which, in which order, how big, which type) and on their weights.

Each rank writes every collective into the rehearsal's folder before entering it, and reads what the others wrote.
A disagreement is reported with both sides, and the rank stops instead of waiting for ever.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.diagnose.finding import Finding, Place
from trimtab.rehearse import (
    between_two,
    disagreements,
    parted_groups,
    places,
    sharded_weights,
    shared_buffers,
    shield,
    skipped_modules,
)
from trimtab.rehearse.session import read_lines
from trimtab.rehearse.skipped_modules import Ran

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process


class RanksDisagree(RuntimeError):
    """Raised in a rank that would wait for ever."""

    _trimtab_recorded = True


_Pair = tuple[str, int, int, int]
"""The group, who sends, who receives, and the tag where it counts."""


@dataclass
class _World:
    """This process as a rank."""

    name: str
    rank: int
    size: int
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    peers: dict[int, _Peer] = field(default_factory=dict)
    last: dict[str, Any] | None = None
    first: dict[str, Any] | None = None
    """The first collective that needed a GPU."""
    mixed_up: bool = False
    """Whether it was told that ranks sum up figures, or gather weights, of different names."""
    shared_gpu: bool = False
    """Whether it was told that two ranks use one GPU."""
    ran: dict[int, Ran] = field(default_factory=dict)
    """The modules that have run here, by step."""
    members: dict[str, list[int]] = field(default_factory=dict)
    """The ranks of groups of some."""
    messages: dict[_Pair, int] = field(default_factory=lambda: defaultdict(int))
    """How many were sent, or awaited, between two ranks of a group."""
    groups: int = 0
    """How many groups were made with all ranks."""
    file: int = -1
    """What this rank writes to; open, for a sharded step enters thousands of collectives."""


@dataclass
class _Peer:
    """What another rank has written so far."""

    path: Path
    offset: int = 0
    calls: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    last: dict[str, Any] | None = None
    ran: dict[int, Ran] = field(default_factory=dict)
    messages: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)

    def read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                record = json.loads(line)
                if "op" in record:
                    self.calls[record["group"], record["n"]] = record
                    self.last = record
                    self.ran.setdefault(record["step"], {}).update(record["modules"])
                elif "message" in record:
                    self.messages[*record["key"], record["n"], record["message"]] = record
                elif "makes" in record:
                    self.groups[record["n"]] = record


_DEEPEST = 24
"""Lines of the program's own stack that are written down for a collective."""
_world: _World | None = None
_made = 0


def made() -> int:
    """How many collectives this process has entered."""
    return _made


def reached() -> dict[str, int]:
    """How many collectives of each group this rank has entered."""
    return dict(_world.counts) if _world is not None else {}


def joined(process: Process) -> None:
    """A process group was made: agree with the other ranks on a name for this world."""
    import torch.distributed as dist

    from trimtab.rehearse import ran_modules

    global _world
    if _world is not None:
        os.close(_world.file)
        _world = None
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    rank = dist.get_rank()
    if process.settings.one_rank:
        process.recorder.write(t="stands-for", n=dist.get_world_size())
    ran_modules.watch(modules=not process.settings.one_rank)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("trimtab/world", secrets.token_hex(8))
    name = store.get("trimtab/world").decode()
    path = _path(process.folder, name, rank)
    _world = _World(name, rank, dist.get_world_size())
    _world.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    if not process.settings.one_rank:  # where one stands for all, nobody else writes
        others = (other for other in range(_world.size) if other != rank)
        _world.peers = {other: _Peer(_path(process.folder, name, other)) for other in others}
    _write({"pid": os.getpid()})


def enter(process: Process, record: dict[str, Any], place: Place | None) -> None:
    """Write down a collective that is about to be entered, and compare it with what the others wrote."""
    global _made
    _made += 1
    world = _world
    if world is None:
        return
    from trimtab.rehearse import (
        ran_modules,
        rank_values,
    )  # import torch, which whoever only gathers records does without

    # Where one rank stands for all, nobody compares its way with another's.
    alone = process.settings.one_rank
    group = str(record.get("group", ""))
    number = world.counts[group] = world.counts[group] + 1
    step, ran = ran_modules.take()
    world.ran.setdefault(step, {}).update(ran)
    mine = {
        "group": group,
        "n": number,
        "op": record["op"],
        **{
            name: record.get(name)
            for name in ("numel", "dtype", "root", "gpu", "shape", "gives", "bytes", "size", "parts")
        },
        "members": [] if alone else _members(world, group, record.get("size")),
        "born": list(record["born"][:2]) if record.get("born") else None,
        "node": os.environ.get("GROUP_RANK", "0"),
        "card": _card(record.get("gpu")),
        "place": asdict(place) if place else None,
        "way": [] if alone else _way(),
        "quiet": ran_modules.quiet(),
        "weights": [] if alone else sharded_weights.named(),
        "buffers": shared_buffers.named() if record["op"] == "broadcast" and not alone else {},
        "values": [] if alone else rank_values.now(),
        "step": step,
        "modules": ran,
    }
    world.last = mine
    world.first = world.first or (mine if mine["gpu"] else None)
    _write(mine)
    for rank, peer in world.peers.items():
        peer.read()
        theirs = peer.calls.get((group, number))
        if theirs is not None and not world.shared_gpu and _same_gpu(mine, theirs):
            world.shared_gpu = True
            began = world.first if world.first and world.first["gpu"] == mine["gpu"] else mine
            process.report(disagreements.shared_gpu(world.rank, rank, began))
        if theirs is not None and _signature(theirs) != _signature(mine):
            process.recorder.write(t="failed")
            ran_there = peer.ran.get(step, {}) if theirs["step"] == step else None
            quiet = {number for number, side in ((world.rank, mine), (rank, theirs)) if side["quiet"]}
            stands = {
                number: [(file, line) for file, line in side["way"]]
                for number, side in ((world.rank, mine), (rank, theirs))
            }
            skipped = (
                skipped_modules.parting(
                    *_by_rank((world.rank, world.ran[step]), (rank, ran_there)), quiet, stands
                )
                if ran_there is not None
                else None
            )
            process.report(disagreements.disagreement(world.rank, mine, rank, theirs, skipped))
            raise RanksDisagree(f"ranks {world.rank} and {rank} disagree on a collective")
        if theirs is not None and mine["parts"] and theirs["parts"] and _sizes_known():
            _stop_if(process, between_two.unlike_parts(world.rank, mine, rank, theirs), rank)
        if theirs is not None and not world.mixed_up:
            mixed = disagreements.mixed_up(world.rank, mine, rank, theirs)
            mixed = mixed or disagreements.mixed_weights(world.rank, mine, rank, theirs)
            world.mixed_up = mixed is not None
            # One rank tells it: the other would at a later line, where it happens again.
            if mixed is not None and not any(record["t"] == "mixed" for record in process.others_records()):
                process.recorder.write(t="mixed")
                process.report(mixed)


def message(process: Process, record: dict[str, Any], place: Place | None) -> None:
    """Write down a message that is about to be sent or awaited, and compare it with its other end."""
    world = _world
    if world is None or not world.peers:
        return
    group, sends = str(record["group"]), record["op"] == "send"
    members = _members(world, group, record["size"]) or list(range(world.size))
    ends = (record["rank"], record["peer"]) if sends else (record["peer"], record["rank"])
    pair = (group, *ends, record["tag"])
    number = world.messages[pair] = world.messages[pair] + 1
    mine = {
        "message": record["op"],
        "key": pair,
        "n": number,
        "pair": [members[end] for end in ends],
        **{name: record[name] for name in ("numel", "dtype", "bytes")},
        "born": list(record["born"][:2]) if record["born"] else None,
        "place": asdict(place) if place else None,
    }
    _write(mine)
    other = members[record["peer"]]
    peer = world.peers.get(other)
    if peer is None or not _sizes_known():
        return
    peer.read()
    theirs = peer.messages.get((*pair, number, "recv" if sends else "send"))
    if theirs is not None:
        _stop_if(process, between_two.unlike_message(*((mine, theirs) if sends else (theirs, mine))), other)


def group_made(process: Process, members: list[int], place: Place | None) -> None:
    """Write down a group that is about to be made, and compare it with the one that other ranks make."""
    world = _world
    if world is None or not world.peers:
        return
    world.groups += 1
    mine = {"makes": members, "n": world.groups, "place": asdict(place) if place else None}
    _write(mine)
    for rank, peer in world.peers.items():
        peer.read()
        if world.groups in peer.groups:
            _stop_if(process, parted_groups.unlike(world.rank, mine, rank, peer.groups[world.groups]), rank)


def _stop_if(process: Process, found: Finding | None, other: int) -> None:
    """Tell what parts two ranks, and stop this one."""
    if found is None or _world is None:
        return
    process.recorder.write(t="failed")
    process.report(found)
    raise RanksDisagree(f"ranks {_world.rank} and {other} disagree on what they make or hand each other")


def _sizes_known() -> bool:
    """Whether sizes are the program's own: of shapes alone, one that was asked for a value goes on with a stand-in."""
    from trimtab.virtual import state

    machine = state.machine()
    return machine is None or not any(asked.how in ("decision", "shape") for asked in machine.asked)


def lost_peer(process: Process, error: BaseException, stack: list[Place]) -> tuple[bool, Finding | None]:
    """An error of the transport: another rank is gone or never came. Says whether this is ours to tell, and what."""
    world = _world
    if world is None:
        return False, None
    if any(record["t"] == "failed" for record in process.others_records()):
        return True, None
    where, mine = places.first_own(stack), world.last
    for rank, peer in world.peers.items():
        peer.read()
        if mine is not None and (mine["group"], mine["n"]) not in peer.calls:
            return True, disagreements.missing(world.rank, mine, rank, peer.last, where, str(error))
    return False, None


def said_shortly(error: BaseException, process: Process) -> bool:
    """Print a line, in a traceback's place, for an error that only stops ranks that disagree: one that was raised for
    that, or the transport's word of such a rank. The report tells all of it; on hardware the ranks would wait."""
    echo = isinstance(error, RanksDisagree)
    if _world is not None and "gloo/transport" in str(error):
        found = (record["finding"]["kind"] for record in process.others_records() if record["t"] == "finding")
        echo = "ranks-disagree" in found
    if not echo or os.environ.get(shield.DEBUG):
        return False
    print("stopped: the ranks disagree, as the report tells", file=sys.stderr)
    return True


def note(process: Process, record: dict[str, Any]) -> None:
    """Write down what the parent is to compare between the ranks; nothing without a group of several."""
    if _world is not None and not process.settings.shapes_only:
        _write(record)


def worlds(folder: Path) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """What the ranks of each process group wrote down, by rank (read by the parent)."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = defaultdict(dict)
    for path in sorted(folder.glob("collectives-*.jsonl")):
        _, world, rank = path.stem.split("-")
        found[world][int(rank)] = list(read_lines(path))
    return found


def _way() -> list[list[Any]]:
    """The program's own lines that led here, innermost first."""
    return [[f.f_code.co_filename, f.f_lineno] for f in itertools.islice(places.frames(), _DEEPEST)]


def _by_rank(one: tuple[int, Ran], other: tuple[int, Ran]) -> tuple[int, Ran, int, Ran]:
    low, high = sorted((one, other), key=lambda side: side[0])
    return *low, *high


def _members(world: _World, group: str, size: int | None) -> list[int]:
    """The ranks of a group, by its name; of all ranks none need be told."""
    if size is None or size >= world.size:
        return []
    if group not in world.members:
        from torch.distributed import distributed_c10d

        c10d: Any = distributed_c10d  # versions of torch differ in what they call a name
        world.members[group] = c10d.get_process_group_ranks(c10d._resolve_process_group(group))
    return world.members[group]


def _signature(record: dict[str, Any]) -> tuple[object, ...]:
    return record["op"], record["numel"], record["dtype"], record["root"]


def _card(gpu: str | None) -> int | None:
    """Which of the machine's GPUs it is: each rank may see others (CUDA_VISIBLE_DEVICES), and count them from 0."""
    from trimtab.virtual import state

    kind, _, index = (gpu or "").partition(":")
    machine = state.machine()
    if kind != "cuda" or machine is None or int(index or 0) >= len(machine.devices):
        return None
    return machine.devices[int(index or 0)].card


def _same_gpu(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return bool(
        mine["card"] is not None and mine["card"] == theirs["card"] and mine["node"] == theirs["node"]
    )


def _path(folder: Path, world: str, rank: int) -> Path:
    return folder / f"collectives-{world}-{rank}.jsonl"


def _write(record: dict[str, Any]) -> None:
    assert _world is not None
    os.write(_world.file, (json.dumps(record) + "\n").encode())
