"""By how much a device is too small. The rehearsal goes on where its memory ends, so that the whole need is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trimtab.diagnose.finding import Finding, Lack, device_of
from trimtab.rehearse.memory_text import size

if TYPE_CHECKING:
    from trimtab.virtual.state import Machine, VirtualDevice

FIXES = {
    "resume": 'torch.load(…, map_location="cpu"): load_state_dict copies each tensor to where its parameter is',
    "save": "StateDictOptions(full_state_dict=True, cpu_offload=True), or shards that are saved as they are",
    "evaluate": "What an evaluation gathers belongs on the host (.cpu()), or is counted batch by batch",
    "generate": "Fewer prompts at once, or fewer new tokens: the cache grows with both",
}
"""What helps where the memory ends in a phase that trains nothing."""
WHILE_LOADING = (
    "There is no batch yet that could be smaller. Make the weights in their own type at once (from_pretrained(…, "
    "dtype=torch.bfloat16), or torch.set_default_dtype before the model is built: .to() and .half() come when all of "
    "it was made in 32 bits), keep what is not trained on the host, spread the layers over several GPUs "
    "(device_map), or take a larger GPU."
)
"""What helps where a model is being built or moved, and none has run."""
_IN_ONE_PIECE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, then "
"""How the fix of a fragmented memory begins."""
_STANDS = ("weights", "gradients", "optimizer")
"""What is held however few rows there are."""


def full_one(message: str, machine: Machine) -> VirtualDevice:
    """The same as an object."""
    return machine.devices[int(device_of(message).removeprefix("cuda:"))]


def need(told: dict[str, Any]) -> int:
    """What a program needs of a device: what its tensors come to, and what CUDA holds beside them."""
    return int(told["peak_bytes"] + told["context_bytes"])


def room(told: dict[str, Any]) -> int:
    """What a program may have of a device: all of it, unless it was given a part."""
    allowed = told.get("allowed_bytes")
    whole = int(told["capacity_bytes"])
    return whole if allowed is None else min(whole, int(allowed + told["context_bytes"]))


def met(device: VirtualDevice, *, of_cause: bool, frees: int = 0) -> Lack:
    """What is known of a shortage at once: where the run stood. How much is missing is known at its end."""
    return Lack(str(device.device), 0, 0, 0, device.ledger.lap.phase, of_cause, frees)


def measure(findings: list[Finding], memory: dict[str, dict[str, Any]]) -> None:
    """Tell of each device that was found too small how much it lacks."""
    for finding in findings:
        if finding.kind != "out-of-memory" or (finding.lack is not None and finding.lack.need_bytes):
            continue
        found = finding.lack or Lack("", 0, 0, 0)
        finding.lack, told = None, memory.get(device_of(finding.message))
        if told is None:
            continue
        device, capacity, needed = device_of(finding.message), room(told), need(told)
        if needed > capacity:
            # Nor would it fit in one piece: that much of it lay idle in pieces is not what is wrong.
            finding.fix = finding.fix.removeprefix(_IN_ONE_PIECE)
        else:
            # It would fit in one piece: what the allocator reserves to give it out in pieces does not.
            needed = max(needed, int(told["reserved_bytes"] + told["context_bytes"]))
        short = max(0, needed - capacity)
        finding.lack = replace(
            found, device=device, capacity_bytes=capacity, need_bytes=needed, short_bytes=short
        )
        if not finding.edits and not found.of_cause:
            finding.fix = _no_row_helps(told, capacity) or FIXES.get(found.phase, finding.fix)
        elif 0 < found.frees_bytes < short:
            finding.lack = replace(finding.lack, of_cause=False)
            rest = f"That gives back {size(found.frees_bytes)}, which is not enough by itself."
            finding.fix = f"{finding.fix} {rest} {_no_row_helps(told, capacity)}".rstrip()
        if needed > capacity:
            finding.message = (
                f"{device} has {size(capacity)}, and the program needs {size(needed)}: {size(short)} too little.\n"
                + finding.message
            )
        finding.op = told["at_peak"]["op"] if finding.op == "alloc" and told["at_peak"] else finding.op


def _no_row_helps(told: dict[str, Any], capacity: int) -> str:
    """What to do where all that stands by the side of the rows is too much by itself; empty where it is not."""
    kinds = (told.get("at_peak") or {}).get("kinds") or {}
    held = {kind: kinds[kind] for kind in _STANDS if kinds.get(kind)}
    alone = sum(held.values()) + int(told["context_bytes"])
    if alone <= capacity:
        return ""
    parts = ", ".join(f"{kind} {size(count)}" for kind, count in held.items())
    return (
        f"No smaller batch helps: {parts} and CUDA's own {size(told['context_bytes'])} are more than the GPU has. "
        "Train fewer weights (LoRA), hold them in 16 bits or fewer, take an optimizer with less state (8-bit, SGD), "
        "share them out (FSDP2's fully_shard, or layers on several GPUs), or take a larger GPU."
    )
