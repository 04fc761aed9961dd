"""What cannot reach its tensors: a kernel that is launched by hand, which runs on the current device wherever they are,
and NCCL where they lie on the host."""

from __future__ import annotations

import ast

from trimtab.diagnose import rewrite, source
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


def without_host_backend(scene: Scene) -> Verdict | None:
    """A tensor of the host that a library hands to NCCL, as the norm of gradients that FSDP2 keeps on the host: none of
    the program's own lines holds it, and the group is what lacks a backend for it."""
    op, files = scene.fault.op.removeprefix("c10d."), dict.fromkeys(at.file for at in scene.fault.stack)
    here = scene.fault.frame
    if here is None or any(source.called_name(call) == op for call in source.call_on(here.file, here.line)):
        return None
    for file in files:
        for call in source.calls(file, "init_process_group"):
            for node in (n for n in ast.walk(call) if isinstance(n, ast.Constant) and n.value == "nccl"):
                why = "the ranks have NCCL alone, which takes no tensor of the host, and this gives it one"
                why = f"{why} (line {here.line})"
                both = '"cpu:gloo,cuda:nccl"'
                fix = f"Let gloo exchange what lies on the host: init_process_group({both})."
                edits = [rewrite.in_place_of(file, node, both)]
                return Verdict(source.cause(file, call.lineno, why), fix, edits=edits)
    return None
