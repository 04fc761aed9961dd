"""Why a kernel that is launched by hand cannot reach its tensors: it runs on the current device, wherever they are."""

from __future__ import annotations

from trimtab.diagnose import source
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene


def current_device(scene: Scene) -> Verdict | None:
    """All tensors of a Triton kernel are on one GPU, and another one is current."""
    fault = scene.fault
    devices = {operand.device for operand in fault.operands}
    if not fault.op.startswith("triton.") or len(devices) != 1 or fault.frame is None:
        return None
    there = devices.pop()
    name = fault.op.removeprefix("triton.")
    tensor = next((held for s in scene.operands if (held := scene.expression_of(s))), None)
    launched = fault.frame in fault.frames[:3]  # the line itself, not one that led to a library's launch
    guard = f"torch.cuda.device({tensor}.device)" if launched and tensor else f'torch.cuda.device("{there}")'
    why = f"the kernel {name} runs on the current device, and its tensors are on {there}"
    fix = f"make theirs the current one around this call: with {guard}: {{code}}"
    code = source.place(fault.frame.file, fault.frame.line).code
    fix = (
        fix.format(code=code) if launched else f"make theirs the current one around this call: with {guard}:"
    )
    return Verdict(source.cause(fault.frame.file, fault.frame.line, why), fix)
