"""Which rank keeps the others waiting: from what every rank last said of itself to one sentence. It changes nothing.

A rank is behind when it is gone, is stopped, says nothing, stands outside every exchange while others wait in one, or
waits in an earlier exchange than they do. A run stands still when no rank gets on: each waits in an exchange, is idle
with a stack that does not move, or cannot get on at all. One that works makes it slow, not stuck.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.monitor.board import RankReport
from trimtab.monitor.collectives import in_words
from trimtab.monitor.wording import duration


@dataclass(frozen=True)
class Standstill:
    """How a run of several ranks stands."""

    stuck: bool
    """No rank gets on; else it is slow."""
    behind: tuple[int, ...]
    """The ranks that the others wait for; empty where nothing tells them apart."""
    text: str


def judge(
    reports: Mapping[int, RankReport], world: int, fresh: float, now: float | None = None
) -> Standstill:
    """`fresh`: how many seconds ago a rank that can speak must have spoken."""
    now = time.time() if now is None else now
    words: dict[int, str] = {}
    dead: list[int] = []
    working: list[int] = []
    waiting: dict[int, RankReport] = {}
    outside: list[int] = []
    for rank in range(world):
        report = reports.get(rank)
        trouble = _trouble(report, now, fresh)
        if trouble is not None:
            dead.append(rank)
            words[rank] = trouble
        elif report is not None and report.collective is not None and report.collective["waits"]:
            waiting[rank] = report
        elif report is not None:
            outside.append(rank)
            if not report.idle:
                working.append(rank)
            words[rank] = _where(report)
    behind = dead or (outside if waiting else []) or _earliest(waiting)
    for rank in behind:
        if rank in waiting:
            words[rank] = _where(waiting[rank])
    lines = [f"{_named([rank])} is behind: {words[rank]}" for rank in behind]
    others = {rank: report for rank, report in waiting.items() if rank not in behind}
    lines += [
        f"{_named(ranks)} {'wait' if len(ranks) > 1 else 'waits'} "
        + (f"for {'it' if len(behind) == 1 else 'them'} " if behind else "")
        + f"in {what}"
        for what, ranks in _together(others).items()
    ]
    if not behind:
        lines += [f"{_named([rank])} {words[rank]}" for rank in outside]
        if len(waiting) == world and len(_together(waiting)) == 1:
            lines.append(
                "all wait in the same exchange: the network between them, or the exchange itself, hangs"
            )
        elif len(waiting) == world:
            lines.append("they are in different exchanges: one of them took another way through the program")
    return Standstill(not working, tuple(behind), "; ".join(lines))


def _trouble(report: RankReport | None, now: float, fresh: float) -> str | None:
    """Why a rank cannot get on; None for one that lives and speaks."""
    if report is None:
        return "it has said nothing (its output_dir may be another machine's)"
    standing = report.process.standing()
    process = f"process {report.process.pid} on {report.process.host}"
    at = f" at step {report.step}" if report.step is not None else ""
    if report.state == "failed":
        return f"it failed{at}: {report.error.splitlines()[0] if report.error else 'no reason is known'}"
    if standing == "gone":
        return f"{process} is gone"
    if standing == "stopped":
        return (
            f"{process} is stopped (SIGSTOP, or a debugger); `kill -CONT {report.process.pid}` lets it go on"
        )
    if now - report.at > fresh:
        return f"{process} has not answered for {duration(now - report.at)}"
    return None


def _where(report: RankReport) -> str:
    at = f", {report.doing}" if report.doing else ""
    text = f"it is in {report.place} for {duration(report.silence)}{at}"
    if report.collective is not None:
        did = "waits in" if report.collective["waits"] else "last ended"
        text += f", and {did} {in_words(report.collective)}"
    return text if report.idle or (report.collective or {}).get("waits") else f"{text}, at work"


def _earliest(waiting: Mapping[int, RankReport]) -> list[int]:
    """Of ranks that all wait, those in an earlier exchange than others, or in another one of the same number."""
    seen = {rank: report.collective for rank, report in waiting.items() if report.collective is not None}
    if len({collective["group"] for collective in seen.values()}) != 1:
        return []
    numbers = {rank: collective["number"] for rank, collective in seen.items()}
    first = min(numbers.values())
    if first != max(numbers.values()):
        return [rank for rank, number in numbers.items() if number == first]
    kinds = _together(waiting)
    fewest = min(kinds.values(), key=len)
    return list(fewest) if 1 < len(kinds) < len(seen) else []


def _together(waiting: Mapping[int, RankReport]) -> dict[str, list[int]]:
    """Ranks by the exchange that they wait in."""
    groups: dict[str, list[int]] = {}
    for rank, report in waiting.items():
        groups.setdefault(in_words(report.collective or {}), []).append(rank)
    return groups


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]} to {ranks[-1]})"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
