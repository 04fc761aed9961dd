"""What to write into the call that wraps a model in DistributedDataParallel. Reads source, runs nothing."""

from __future__ import annotations

import ast
import re

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Edit, Place

_WRAPPERS = ("DistributedDataParallel", "DDP")
_OWN = re.compile(r"(?:self\.)?(?:local_rank|rank|gpu|local)")


def looking_for_unused(at: Place) -> list[Edit]:
    """find_unused_parameters=True, written into the call that wraps."""
    if (call := _call(at)) is None:
        return []
    old = source.keyword(call, "find_unused_parameters")
    if old is not None:
        return [rewrite.in_place_of(at.file, old, "True")]
    return [rewrite.add_keyword(at.file, call, "find_unused_parameters", "True")]


def own_gpu(at: Place) -> tuple[str, list[Edit]]:
    """This rank's own GPU as the function around a line calls it, and the edit that names it to DDP."""
    scope = source.function_at(at.file, at.line) or source.tree(at.file)
    nodes = [n for n in ast.walk(scope or ast.Pass()) if isinstance(n, ast.Name | ast.Attribute)]
    names = sorted(
        {text for n in nodes if _OWN.fullmatch(text := ast.unparse(n))}, key=lambda t: "local" not in t
    )
    code = names[0] if names else "torch.cuda.current_device()"
    call = _call(at)
    given = source.keyword(call, "device_ids") if call is not None else None
    return code, [rewrite.in_place_of(at.file, given, f"[{code}]")] if given is not None else []


def _call(at: Place) -> ast.Call | None:
    calls = [c for c in source.call_on(at.file, at.line) if source.called_name(c) in _WRAPPERS]
    return calls[0] if len(calls) == 1 else None
