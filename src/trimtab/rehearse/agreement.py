"""Whether the ranks agree: on each collective (which, in which order, how big, which type) and on their weights.

Each rank writes every collective into the rehearsal's folder before entering it, and reads what the others wrote.
A disagreement is reported with both sides, and the rank stops instead of waiting for ever.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.diagnose import branches, flow, source
from trimtab.diagnose.finding import Edit, Finding, Place, cause_at, place_from
from trimtab.rehearse import places
from trimtab.rehearse.session import read_lines

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process


class RanksDisagree(RuntimeError):
    """Raised in a rank that would wait for ever."""

    _trimtab_recorded = True


@dataclass
class _World:
    """This process as a rank."""

    name: str
    rank: int
    size: int
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    peers: dict[int, _Peer] = field(default_factory=dict)
    last: dict[str, Any] | None = None


@dataclass
class _Peer:
    """What another rank has written so far."""

    path: Path
    offset: int = 0
    calls: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    last: dict[str, Any] | None = None

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


_DEEPEST = 24
"""Lines of the program's own stack that are written down for a collective."""
_world: _World | None = None
_made = 0


def made() -> int:
    """How many collectives this process has entered."""
    return _made


def joined(process: Process) -> None:
    """A process group was made: agree with the other ranks on a name for this world."""
    import torch.distributed as dist

    global _world
    if not dist.is_initialized() or dist.get_world_size() < 2:
        _world = None
        return
    rank = dist.get_rank()
    if process.settings.shapes_only:
        process.recorder.write(t="stands-for", n=dist.get_world_size())
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("trimtab/world", secrets.token_hex(8))
    name = store.get("trimtab/world").decode()
    _world = _World(name, rank, dist.get_world_size())
    _world.peers = {
        other: _Peer(_path(process.folder, name, other)) for other in range(_world.size) if other != rank
    }
    _write(process, {"pid": os.getpid()})


def enter(process: Process, record: dict[str, Any], place: Place | None) -> None:
    """Write down a collective that is about to be entered, and compare it with what the others wrote."""
    global _made
    _made += 1
    world = _world
    if world is None:
        return
    group = str(record.get("group", ""))
    number = world.counts[group] = world.counts[group] + 1
    mine = {
        "group": group,
        "n": number,
        "op": record["op"],
        **{name: record.get(name) for name in ("numel", "dtype", "root", "gpu")},
        "born": list(record["born"][:2]) if record.get("born") else None,
        "node": os.environ.get("GROUP_RANK", "0"),
        "place": asdict(place) if place else None,
        "way": [[f.f_code.co_filename, f.f_lineno] for f in itertools.islice(places.frames(), _DEEPEST)],
    }
    world.last = mine
    _write(process, mine)
    for rank, peer in world.peers.items():
        peer.read()
        theirs = peer.calls.get((group, number))
        if theirs is not None and _same_gpu(mine, theirs):
            process.report(_shared_gpu(world.rank, rank, mine))
        if theirs is not None and _signature(theirs) != _signature(mine):
            process.recorder.write(t="failed")
            process.report(_disagreement(world.rank, mine, rank, theirs))
            raise RanksDisagree(f"ranks {world.rank} and {rank} disagree on a collective")


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
            return True, _missing(world.rank, mine, rank, peer.last, where, str(error))
    return False, None


def note(process: Process, record: dict[str, Any]) -> None:
    """Write down what the parent is to compare between the ranks; nothing without a group of several."""
    if _world is not None and not process.settings.shapes_only:
        _write(process, record)


def stuck(folder: Path) -> Finding | None:
    """When time ran out: a rank that stands in a collective which another has not entered (read by the parent)."""
    for ranks in worlds(folder).values():
        calls = {rank: [record for record in records if "op" in record] for rank, records in ranks.items()}
        counts = {
            rank: max((record["n"] for record in made if record["group"] == "0"), default=0)
            for rank, made in calls.items()
        }
        if len(set(counts.values())) > 1:
            ahead, behind = max(counts, key=lambda r: counts[r]), min(counts, key=lambda r: counts[r])
            mine = calls[ahead][-1]
            return _missing(
                ahead, mine, behind, calls[behind][-1] if calls[behind] else None, None, "time ran out"
            )
    return None


def worlds(folder: Path) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """What the ranks of each process group wrote down, by rank (read by the parent)."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = defaultdict(dict)
    for path in sorted(folder.glob("collectives-*.jsonl")):
        _, world, rank = path.stem.split("-")
        found[world][int(rank)] = list(read_lines(path))
    return found


def _signature(record: dict[str, Any]) -> tuple[object, ...]:
    return record["op"], record["numel"], record["dtype"], record["root"]


def _same_gpu(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return bool(
        mine["gpu"]
        and mine["gpu"].startswith("cuda")
        and mine["gpu"] == theirs["gpu"]
        and mine["node"] == theirs["node"]
    )


def _shared_gpu(rank: int, other: int, record: dict[str, Any]) -> Finding:
    low, high = sorted((rank, other))
    where = place_from(record["place"])
    return Finding(
        kind="placement-conflict",
        message=f"Duplicate GPU detected: rank {low} and rank {high} both on {record['gpu']}. NCCL needs a GPU of its "
        "own for every rank.",
        where=where,
        cause=cause_at(_device_choice(where), "the tensors of every rank are on the same GPU"),
        fix='Give each rank its own GPU before any use of CUDA: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])).',
        op=record["op"],
    )


def _device_choice(where: Place | None) -> Place | None:
    if where is None or (line := source.device_choice(where.file, where.line)) is None:
        return where
    return source.place(where.file, line)


def _disagreement(rank: int, mine: dict[str, Any], other: int, theirs: dict[str, Any]) -> Finding:
    (low, first), (high, second) = sorted([(rank, mine), (other, theirs)], key=lambda side: side[0])
    where, stands = place_from(first["place"]), place_from(second["place"])
    cause = cause_at(stands, f"rank {high} stands here while rank {low} stands at {_line(where)}")
    left = _left_loop(where, stands)
    if left is not None:
        cause = cause_at(left, "one rank leaves this loop before the other: unequal numbers of steps")
    fix, edits = "", list[Edit]()
    if where == stands and first["op"] == second["op"] and second["born"]:
        file, line = second["born"]
        cause = source.cause(file, line, "made here, and it differs from rank to rank")
        if [file, line] in second.get("way", ()):
            cause = cause_at(stands, "what each rank gives here is of another size")
            fix = (
                "Give equal sizes: pad to the longest first (all_gather the sizes), or see that every batch is full "
                "(drop_last=True)."
            )
    elif (
        not (left is not None and "rank" in left.code)
        and (branch := _branch(low, first, high, second)) is not None
    ):
        cause, fix, edits = branch.cause, branch.fix, branch.edits
    return Finding(
        kind="ranks-disagree",
        message=f"Collective number {mine['n']}: rank {low} calls {_said(first)}, rank {high} calls {_said(second)}. "
        "The ranks would wait for each other for ever, or mix up their data.",
        where=where,
        cause=cause,
        fix=fix
        or "All ranks have to make the same collective calls in the same order, with equal sizes and types: look "
        "for a branch on the rank, or for data of different shape.",
        op=first["op"],
        edits=edits,
    )


def _branch(rank: int, mine: dict[str, Any], other: int, theirs: dict[str, Any]) -> branches.Said | None:
    """The condition on the rank, or the decision of one rank alone, behind two different ways."""
    return branches.guard(_way(mine), _way(theirs), rank, other)


def _way(record: dict[str, Any] | None) -> list[tuple[str, int]]:
    return [(file, line) for file, line in (record or {}).get("way", ())]


def _left_loop(one: Place | None, other: Place | None) -> Place | None:
    """Why one of two ranks has left the loop in which the other still stands, if it is so."""
    if one is None or other is None or one.file != other.file:
        return None
    headers = {place: loop.lineno if (loop := flow.loop_at(place)) else 0 for place in (one, other)}
    inner = max(headers, key=lambda place: headers[place])
    return flow.way_out(inner) if headers[one] != headers[other] else None


def _uneven_loop(where: Place | None, record: dict[str, Any]) -> Place | None:
    """Why the loop around a collective may end earlier on one rank: the innermost one of the way to it that can."""
    way = [source.place(file, line) for file, line in _way(record)]
    for at in (where, *way):
        if at is None or (loop := flow.loop_at(at)) is None:
            continue
        if not flow.is_same_everywhere(loop):
            return flow.way_out(at)
    return flow.way_out(where) if where is not None else None


def _missing(
    rank: int, mine: dict[str, Any], other: int, last: dict[str, Any] | None, where: Place | None, error: str
) -> Finding:
    where = place_from(mine["place"]) or where
    seen = f"its last one was {_said(last)}" if last else "it has made none"
    loop = _uneven_loop(where, mine)
    idle = flow.idle_context(where) if where else None
    way = _way(mine)
    said = (
        (branches.guard(way, _way(last), rank, other) or branches.way_out(way, other)) if not idle else None
    )
    return Finding(
        kind="ranks-disagree",
        message=f"Rank {rank} waits in {_said(mine)} (its collective number {mine['n']}), which rank {other} never "
        f"enters: {seen}. On hardware it would wait until the time-out ends the run{_heard(error)}.",
        where=where,
        cause=said.cause
        if said is not None
        else cause_at(
            idle or loop or where,
            f"rank {rank} goes on when rank {other} has already left: unequal numbers of steps"
            + (", and this context, which could even them out, does nothing" if idle else ""),
        ),
        fix=said.fix
        if said is not None
        else "Give every rank the same number of batches (drop_last=True, a DistributedSampler), or run the loop in "
        "`with ddp.join():`.",
        op=mine["op"],
        edits=said.edits if said is not None else [],
    )


def _heard(error: str) -> str:
    found = re.search(r"Connection closed by peer|Connection reset by peer|Timed out waiting \d+ms", error)
    return f" (here: {found[0]})" if found else ""


def _said(record: dict[str, Any]) -> str:
    place = place_from(record["place"])
    size = f" of {record['numel']} {record['dtype']}" if record["numel"] is not None else ""
    root = f" from rank {record['root']}" if record["root"] is not None else ""
    return f"{record['op']}{size}{root}" + (f" at {_line(place)}" if place else "")


def _line(place: Place | None) -> str:
    return f"{os.path.basename(place.file)}:{place.line}" if place else "an unknown line"


def _path(folder: Path, world: str, rank: int) -> Path:
    return folder / f"collectives-{world}-{rank}.jsonl"


def _write(process: Process, record: dict[str, Any]) -> None:
    assert _world is not None
    file = os.open(
        _path(process.folder, _world.name, _world.rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
    )
    try:
        os.write(file, (json.dumps(record) + "\n").encode())
    finally:
        os.close(file)
