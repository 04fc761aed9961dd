"""What a diagnosis says: one finding, with the line that fails, the line to change and the fix.

These are plain data: no torch, no file is read here. The JSON form is the one that `trimtab rehearse --json` writes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["fault", "warning"]

KINDS: dict[str, str] = {
    "device-mismatch": "operands of one operation live on different devices",
    "index-device": "a tensor is indexed by a tensor on another device",
    "dtype-mismatch": "operands of one operation have different precisions",
    "generator-device": "a random generator belongs to another device than the tensor it should fill",
    "unmoved-state": "optimizer state, a buffer or a plain attribute stayed behind when the model moved",
    "worker-uses-gpu": "a forked worker process touches the GPU",
    "pin-of-gpu-tensor": "a tensor that is already on a GPU is to be pinned in host memory",
    "scaler-misuse": "GradScaler has nothing to scale, or is given fp16 or bf16 gradients",
    "no-gradient": "trainable parameters never receive a gradient, or the loss has no graph",
    "ddp-ready-twice": "DistributedDataParallel sees one parameter's gradient twice in a backward pass",
    "ddp-unused": "DistributedDataParallel waits for gradients of parameters that the loss does not use",
    "ddp-bypassed": "the wrapped module is called directly, so gradients are not averaged over the ranks",
    "ranks-disagree": "ranks issue different collectives, or different numbers of them",
    "stale-launcher": "rank variables of an earlier launch are still set, or a launcher's are missing",
    "placement-conflict": "two parts of the program decide differently where things belong",
    "dataset-field": "a row or batch lacks a field that the code asks for",
    "batch-type": "the batch holds something that cannot become a tensor, or has another shape than it must",
    "map-location": "a checkpoint is loaded onto a device that is not there",
    "garbage-buffer": "a buffer or parameter was never given values",
    "non-finite": "weights, loss or gradients became NaN or infinite",
    "rounded-away": "16 bits round away what the values are there to tell apart",
    "graph-kept": "a tensor that is kept across steps holds its whole graph, so memory grows",
    "data-order": "every epoch sees the data in the same order",
    "stale-gradient": "gradients are not cleared between the steps, or before the step that they were gathered for",
    "eval-mode": "layers run in the wrong mode: training in eval mode, or an evaluation with dropout",
    "wrong-loss": "a loss is given what it takes for something else",
    "no-effect": "a line runs and changes nothing of what it is there to change",
    "used-up": "an iterator that can be gone through once only is used again",
    "autocast-device": "autocast is opened for another device type than the tensors'",
    "backend-unsupported": "this device or build has no such operation",
    "ranks-apart": "ranks train, and nothing averages their gradients or weights",
    "same-rows": "several ranks, or workers of a loader, read the same rows",
    "data-unreachable": "the program asks for data, or weights, that cannot be reached from here",
    "out-of-memory": "the device has not enough memory",
    "other-error": "the program stopped for a reason that has no kind of its own",
}


UNKNOWN = "correct this line or what it is given"
"""The fix where nothing is known of an error's words; a rehearsal adds what it has proven."""
CARRIED = "_trimtab_finding"
"""Where an error that a worker raised carries what was found in the worker, as plain data."""


@dataclass(frozen=True)
class Place:
    """A line of a program."""

    file: str
    line: int
    code: str = ""


@dataclass(frozen=True)
class Cause(Place):
    """The line that has to change, and why."""

    why: str = ""


@dataclass(frozen=True)
class TensorNote:
    """One operand of the failing operation."""

    name: str
    device: str
    dtype: str
    shape: tuple[int, ...] = ()
    born: Place | None = None


@dataclass(frozen=True)
class Edit:
    """One change to a file: what stands from one place to another gives way to a text (see `rewrite`).

    Lines count from 1, columns from 0 in characters. Where start and end are the same, the text is put in.
    """

    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    text: str


_FULL = re.compile(r"\bGPU (\d+) has a total capacity")


def device_of(message: str) -> str:
    """The device that CUDA's message of a full GPU names."""
    found = _FULL.search(message)
    return f"cuda:{found.group(1)}" if found else ""


@dataclass(frozen=True)
class Lack:
    """By how much a device is too small."""

    device: str
    capacity_bytes: int
    need_bytes: int
    """What the program comes to when it goes on past the end of the memory."""
    short_bytes: int
    phase: str = ""
    """In which phase of the run it was met."""
    of_cause: bool = False
    """Whether the finding's fix undoes its cause: it then stands before what only takes less."""
    frees_bytes: int = 0
    """What that gives back, where it is known."""


@dataclass(frozen=True)
class Saving:
    """A change that was rehearsed for the memory that it saves."""

    change: str
    settings: list[str]
    """The change as `key=value` of a Trimtab config; none for another program."""
    need_bytes: int
    """What the fullest device then needs."""
    saved_bytes: int
    fits: bool
    """Whether the program, rehearsed with it, found memory enough on every device."""
    how: str = ""
    """What to write in another program, with its lines."""


@dataclass
class Finding:
    """One distinct fault or warning."""

    kind: str
    severity: Severity = "fault"
    message: str = ""
    """What the hardware, the library or the check says."""
    where: Place | None = None
    """The line that fails: in the user's own code when there is any on the stack."""
    cause: Cause | None = None
    """The line that has to change."""
    fix: str = ""
    """One sentence, with the code to write."""
    op: str = ""
    module: str = ""
    tensors: list[TensorNote] = field(default_factory=list)
    count: int = 1
    """How often it was met."""
    library: Place | None = None
    """The line inside a library that fails, when the user's line only led there."""
    edits: list[Edit] = field(default_factory=list)
    """The fix as changes to the user's files, where it can be written down as code that runs in that place."""
    tried: str = ""
    """What a rehearsal with the edits showed: "gone", "remains", "another", "idle", or nothing when none was made."""
    follows: list[Finding] = field(default_factory=list)
    """Findings that only follow from this one."""
    lack: Lack | None = None
    """Of a device that is too small: by how much."""
    savings: list[Saving] = field(default_factory=list)
    """What would save memory, each as it was rehearsed."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of finding {self.kind!r}; the kinds are {', '.join(KINDS)}")

    @property
    def vague(self) -> bool:
        """Whether no other line than the failing one is named as the cause."""
        return self.cause is None or self.where is None or self.cause.line == self.where.line

    def to_dict(self) -> dict[str, Any]:
        """The finding as it stands in the report's JSON."""
        return asdict(self)

    def key(self) -> tuple[object, ...]:
        """Equal for two findings that a reader would call the same fault."""
        place = [(p.file, p.line) if p else None for p in (self.cause, self.where, self.library)]
        return (self.kind, self.severity, *place) if any(place) else (self.kind, self.severity, self.message)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Finding:
        """The finding back from its JSON form (a rehearsal's child process hands findings over as JSON)."""
        notes = [
            TensorNote(**{**note, "shape": tuple(note["shape"]), "born": place_from(note.get("born"))})
            for note in data.get("tensors", [])
        ]
        places = {name: place_from(data.get(name)) for name in ("where", "library")}
        cause = Cause(**data["cause"]) if data.get("cause") else None
        edits = [
            Edit(**{**edit, "start": tuple(edit["start"]), "end": tuple(edit["end"])})
            for edit in data.get("edits", [])
        ]
        follows = [cls.from_dict(one) for one in data.get("follows", [])]
        lack = Lack(**data["lack"]) if data.get("lack") else None
        savings = [Saving(**saving) for saving in data.get("savings", [])]
        parts: dict[str, Any] = {"cause": cause, "tensors": notes, "edits": edits, "follows": follows}
        parts |= {"lack": lack, "savings": savings}
        return cls(**{**data, **places, **parts})


def place_from(data: dict[str, Any] | None) -> Place | None:
    """A place back from its JSON form."""
    return Place(**data) if data else None


def cause_at(place: Place | None, why: str) -> Cause | None:
    """The same place as a cause."""
    return Cause(place.file, place.line, place.code, why) if place else None
