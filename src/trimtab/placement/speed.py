"""Which of the faster ways to compute a step a run uses, each with its reason: from the request and the machine.

What only the loaded model can tell (the structure of its blocks) is left to fast/apply.py, which falls back with a
message. Decides; it changes no model and imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from trimtab.hardware import Accelerator, Hardware
from trimtab.placement.activations import Computed
from trimtab.placement.plan import Precision, Speed, Strategy
from trimtab.placement.profile import Workload
from trimtab.placement.sizing import PlacementError

Part = Literal["adapters", "head", "compile", "padding", "kernels"]
PARTS: tuple[Part, ...] = ("adapters", "head", "compile", "padding", "kernels")
ANY_HEAD = "any head"
"""Said of a recipe beside its parts: its head in chunks may be trained, and lie on another GPU than the loss."""
COMPILED_FROM = 8.0
"""The least compute capability for which layers are compiled and Triton's kernels are used by default."""
FLASH_FROM = 8.0
"""The least compute capability that torch's flash attention runs on."""
_FAST: Mapping[Part, Any] = {
    "adapters": "fused",
    "head": "chunked",
    "compile": True,
    "padding": "none",
    "kernels": "triton",
}
_PLAIN: Mapping[Part, Any] = {
    "adapters": "plain",
    "head": "plain",
    "compile": False,
    "padding": "padded",
    "kernels": "plain",
}


@dataclass(frozen=True, kw_only=True)
class SpeedRequest:
    """What was asked for, `auto` and None left open, and what the run is."""

    adapters: str = "auto"
    head: str = "auto"
    compile: bool | None = None
    padding: str = "auto"
    kernels: str = "auto"
    activation_memory_budget: float | None = None
    offered: frozenset[str] = frozenset({"adapters", "compile", "kernels"})
    """The parts that the run's recipe can use at all, and `ANY_HEAD` where that holds."""
    recipe: str = "this recipe"
    full_tuning: bool = False
    dora: bool = False
    attention: str | None = None
    """The attention kernel, where the user chose one."""

    @classmethod
    def of(cls, settings: Any, **more: Any) -> SpeedRequest:
        """From the section `speed` of a config."""
        asked = {field.name for field in fields(cls)} & set(type(settings).model_fields)
        return cls(**{name: getattr(settings, name) for name in asked}, **more)

    def wanted(self, part: Part) -> bool | None:
        """Whether the faster way is demanded or forbidden; None: left open."""
        asked = getattr(self, part)
        return None if asked in (None, "auto") else asked == _FAST[part]


class _Obstacle(NamedTuple):
    """What stands against the faster way."""

    why: str
    way_out: str
    """What to change; empty: it is only not the default, and is tried where it was asked for."""


@dataclass(frozen=True)
class _Situation:
    request: SpeedRequest
    hardware: Hardware
    device: str
    precision: Precision
    strategy: Strategy
    training: bool

    @property
    def kind(self) -> str:
        return self.device.split(":")[0]

    @property
    def gpus(self) -> tuple[Accelerator, ...]:
        """The GPUs that the run may compute on: of several processes all, for each must decide alike."""
        if self.strategy == "single":
            return tuple(gpu for gpu in self.hardware.gpus if gpu.name == self.device)
        return self.hardware.gpus


def choose_speed(
    request: SpeedRequest,
    hardware: Hardware,
    device: str,
    precision: Precision,
    strategy: Strategy,
    *,
    training: bool,
) -> tuple[Speed, dict[str, str]]:
    """The parts, and the reason for each by `speed.PART`. A demanded part that cannot be had is an error."""
    here = _Situation(request, hardware, device, precision, strategy, training)
    chosen: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for part in PARTS:
        if (why := _not_rehearsed(part, hardware)) is not None:
            # Also where they were asked for: the real machine may have them.
            chosen[part], reasons[f"speed.{part}"] = _PLAIN[part], why
            continue
        against, wanted = list(_obstacles(part, here)), request.wanted(part)
        hard = next((obstacle for obstacle in against if obstacle.way_out), None)
        if wanted and hard is not None:
            raise PlacementError.of(f"speed.{part}={_word(getattr(request, part))}", *hard)
        if wanted is None:
            chosen[part] = (_PLAIN if against else _FAST)[part]
            reasons[f"speed.{part}"] = against[0].why if against else _why(part, here)
        else:
            chosen[part], reasons[f"speed.{part}"] = (_FAST if wanted else _PLAIN)[part], "asked for"
    budget = request.activation_memory_budget
    if budget is not None and not chosen["compile"]:
        raise PlacementError.of(
            f"speed.activation_memory_budget={budget:g} without compiled layers",
            f"it is the compiler that chooses what is computed again, and none is used: {reasons['speed.compile']}",
            "set speed.compile: true, or training.gradient_checkpointing: true in its place",
        )
    demanded = tuple(part for part in PARTS if request.wanted(part) and chosen[part] == _FAST[part])
    return Speed(**chosen, activation_memory_budget=budget, demanded=demanded), reasons


def _not_rehearsed(part: Part, hardware: Hardware) -> str | None:
    """Why kernels for GPUs have no part in a rehearsal."""
    if not hardware.virtual or part not in ("kernels", "padding"):
        return None
    if not hardware.shapes:
        return "a rehearsal with values computes plainly what kernels would"
    return (
        "triton is not installed where this is rehearsed"
        if part == "kernels" and hardware.triton is None
        else None
    )


def computed_so(work: Workload, speed: Speed, *, one_product: bool) -> Workload:
    """The work as an estimate of memory sees it. `one_product`: the head is frozen and lies whole on one device; any
    other keeps in chunks what the trainers' own loss does."""
    budget = speed.activation_memory_budget
    how = Computed(
        compiled=speed.compile,
        kernels=speed.kernels == "triton",
        kept=1.0 if budget is None else budget,
        chunked_head=speed.head == "chunked" and one_product,
    )
    return replace(work, computed=how)


def _obstacles(part: Part, here: _Situation) -> Iterator[_Obstacle]:
    """All that stands against the faster way of a part."""
    request, off = here.request, f"set speed.{part}: auto"
    if not here.training:
        yield _Obstacle("there are no gradients", off)
    if part not in request.offered:
        yield _Obstacle(f"recipe {request.recipe} has no such way", off)
    if part in ("adapters", "kernels") and request.full_tuning:
        yield _Obstacle("method full has no adapters", f"{off}, or method: lora")
    if part in ("adapters", "kernels") and request.dora:
        yield _Obstacle(
            "DoRA scales the layer's own weight: PEFT's forward computes it", f"{off}, or lora.dora: false"
        )
    if part == "kernels" and request.adapters == "plain":
        yield _Obstacle(
            "they compute fused adapters, and speed.adapters is plain", "set speed.adapters: auto"
        )
    if part == "head" and request.full_tuning and ANY_HEAD not in request.offered:
        yield _Obstacle("method full trains the head", f"{off}, or method: lora")
    whole = {"compile", "kernels", "padding", *(() if ANY_HEAD in request.offered else ("head",))}
    if here.strategy == "split" and part in whole:
        yield _Obstacle(_split(part), f"{off}, or model_parallel: false")
    if part == "padding" and request.attention is not None:
        way_out = f"{off}, or remove model.attn_implementation"
        yield _Obstacle(
            f"model.attn_implementation is {request.attention}, which takes rows of one length", way_out
        )
    if part == "padding" and request.compile and here.kind != "cuda":
        why = "off a GPU rows laid end to end go through attention one by one, which cannot be compiled"
        yield _Obstacle(why, "set speed.compile: false")
    if part == "padding" and here.kind == "cuda":
        yield from _flash(here)
    if part in ("compile", "kernels"):
        yield from _machine(part, here)


def _flash(here: _Situation) -> Iterator[_Obstacle]:
    """What flash attention needs, which alone takes rows end to end on a GPU."""
    off = "set speed.padding: auto"
    if here.precision == "fp32":
        yield _Obstacle("fp32: flash attention is for 16-bit numbers", f"{off}, or precision: bf16")
    old = next((gpu for gpu in here.gpus if float(gpu.capability or 0) < FLASH_FROM), None)
    if old is not None:
        least = f"flash attention needs compute capability {FLASH_FROM}"
        yield _Obstacle(f"{old.model} has {old.capability or 'an unknown one'}; {least}", off)


def _split(part: Part) -> str:
    if part == "compile":
        return (
            "the model is split: hooks move tensors between GPUs inside of each layer, and cannot be compiled"
        )
    return "the model is split over several GPUs, and what is fused has to lie on one"


def _machine(part: Part, here: _Situation) -> Iterator[_Obstacle]:
    """What compiling and Triton need of the machine."""
    hardware, off = here.hardware, f"set speed.{part}: auto"
    if here.kind == "mps":
        yield _Obstacle(
            "not on Apple GPUs: neither Triton nor a proven compiler is there",
            "" if part == "compile" else off,
        )
    if here.kind == "cpu":
        if part == "kernels":
            yield _Obstacle("Triton's kernels run on GPUs", off)
        else:
            yield _Obstacle("compiling pays on GPUs; on the CPU by request (speed.compile=true)", "")
    if here.kind == "cuda":
        if hardware.triton is None and not (hardware.virtual and part == "compile"):
            # What a rehearsal compiles is counted, and not made.
            yield _Obstacle("triton is not installed", f"install triton, or {off}")
        old = next((gpu for gpu in here.gpus if float(gpu.capability or 0) < COMPILED_FROM), None)
        if old is not None:
            least = f"proven from compute capability {COMPILED_FROM} on"
            yield _Obstacle(f"{old.model} has {old.capability or 'an unknown one'}; {least}", "")
        if part == "kernels" and here.precision == "fp32":
            yield _Obstacle("fp32: the kernels are for 16-bit activations", f"{off}, or precision: bf16")


def _why(part: Part, here: _Situation) -> str:
    """The reason for the faster way."""
    gpu = next(iter(here.gpus), None)
    where = f"triton {here.hardware.triton} on {gpu.model}" if gpu is not None else here.device
    head = "the head is frozen: no logits of a whole batch, no gradient of its weight"
    if here.request.full_tuning:
        head = "no logits of a whole batch: a chunk's are made again for the gradient of the head"
    return {
        "adapters": f"products in {here.precision}, no copies of activations in fp32",
        "head": head,
        "compile": f"each layer by itself; {where}",
        "padding": "rows lie end to end, each sees itself alone",
        "kernels": where,
    }[part]


def _word(asked: object) -> str:
    return str(asked).lower() if isinstance(asked, bool) else str(asked)
