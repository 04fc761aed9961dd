"""What was executed before is kept on disk, so that `plan` and `fit` need not do it again.

An answer lies as JSON under the checksum of all that it hangs on (trial_identity.py); one that is damaged is taken for
none. A trial that failed is not kept.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cache import cache_root
from trimtab.files import write_whole
from trimtab.launches import Launch
from trimtab.recipes.trial_server import Answer

if TYPE_CHECKING:
    from trimtab.recipes.planning import Known
    from trimtab.recipes.trial_step import Executed

_MOST = 1000
"""Answers that are kept; of more, the oldest go."""


def known(identity: str | None) -> Known | None:
    """What is known of a model, by the identity that it was kept under; nothing is without one."""
    from pydantic import TypeAdapter

    from trimtab.recipes.planning import Known

    found = _read(identity)
    return None if found is None else TypeAdapter(Known).validate_python(found["answer"])


def keep_known(identity: str, found: Known) -> None:
    _keep(identity, asdict(found))


def executed(identity: str | None) -> Answer | None:
    """What a trial took, with the time at which that was found."""
    from pydantic import TypeAdapter

    from trimtab.recipes.trial_step import Executed

    found = _read(identity)
    if found is None:
        return None
    work = {
        section: {Launch(*launch): number for *launch, number in launches}
        for section, launches in found["answer"]["work"].items()
    }
    done = TypeAdapter(Executed).validate_python({**found["answer"], "work": {}})
    return Answer(replace(done, work=work), since=found["made"])


def keep_executed(identity: str, done: Executed) -> None:
    work = {
        section: [[*launch, number] for launch, number in launches.items()]
        for section, launches in done.work.items()
    }
    _keep(identity, {**asdict(replace(done, work={})), "work": work})


def _place(identity: str) -> Path:
    return cache_root() / "executed" / f"{identity}.json"


def _read(identity: str | None) -> dict[str, Any] | None:
    """What is kept under an identity; None where there is nothing, or nothing whole."""
    if identity is None:
        return None
    try:
        found = json.loads(_place(identity).read_bytes())
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and set(found) == {"made", "answer", "sha256"}
    return found if whole and found["sha256"] == _checksum(found["made"], found["answer"]) else None


def _keep(identity: str, answer: dict[str, Any]) -> None:
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    place = _place(identity)
    content = {"made": made, "answer": answer, "sha256": _checksum(made, answer)}
    try:
        write_whole(place, json.dumps(content))
        kept = [path for path in place.parent.glob("*.json") if len(path.stem) == len(identity)]
        for path in sorted(kept, key=lambda path: path.stat().st_mtime)[:-_MOST]:
            path.unlink(missing_ok=True)
    except OSError:
        return  # a folder that is full or read-only: it is executed again the next time


def _checksum(made: Any, answer: Any) -> str:
    return hashlib.sha256(json.dumps([made, answer], sort_keys=True).encode()).hexdigest()
