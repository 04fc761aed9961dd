"""What to write where a model is wrapped for several ranks: the wrap itself, with the program's own names, and the
settings of DistributedDataParallel. Reads source, runs nothing; changes no file."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from trimtab.diagnose import own_figures, rewrite, source, trace
from trimtab.diagnose.finding import Edit, Finding, Place, cause_at

WRAPPERS = ("DistributedDataParallel", "DDP")
_MOVES = ("to", "cuda")
_RANKS = ("local_rank", "gpu", "gpu_id", "device", "rank")
_THERE = re.compile(r"\b(?:exists|isfile|is_file|isdir|is_dir)\(")
_OWN = re.compile(r"(?:self\.)?(?:local_rank|rank|gpu|local)")


@dataclass
class Fix:
    """What to write, where, and as changes where it runs as it stands."""

    text: str
    place: Place | None = None
    """The line to change, when it is another than the one that was asked about."""
    edits: list[Edit] = field(default_factory=list)

    def finding(self, kind: str, message: str, where: Place | None, why: str, op: str) -> Finding:
        """What is told where this is the fix."""
        return Finding(
            kind,
            message=message,
            where=where,
            cause=cause_at(self.place, why),
            fix=self.text,
            op=op,
            edits=self.edits,
        )


def wrap(made: Place | None, moved: Place | None, *, gpu: bool) -> Fix:
    """A model that nothing wraps: after the line that moved it, else before its optimizer."""
    model = _model_of(made) if made is not None else None
    if made is not None and model is not None and (prepared := prepare(made, model)) is not None:
        return prepared
    for place in (moved, _last_binding(made, model)):
        fix = _wrap_at(place, gpu) if place is not None else None
        if fix is not None:
            return fix
    name = model or "model"
    ids = ", device_ids=[local_rank]" if gpu else ""
    return Fix(f"Wrap the model before it is trained: {name} = DistributedDataParallel({name}{ids}).")


def model_line(made: Place | None, moved: Place | None) -> tuple[Place | None, str | None]:
    """The line that leaves a model in a name, from the line that moved it or made its optimizer, and that name."""
    model = _model_of(made) if made is not None else None
    for place in (moved, _last_binding(made, model)):
        target, _ = _kept(source.statement(place.file, place.line)) if place is not None else (None, None)
        if target is not None:
            return place, target
    return None, model


def _wrap_at(place: Place, gpu: bool) -> Fix | None:
    node = source.statement(place.file, place.line)
    target, value = _kept(node)
    if node is None or value is None:
        return None
    ids = f", device_ids=[{_device(place, value)}]" if gpu else ""
    name = imported(place.file, "DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel")
    if isinstance(node, ast.Return):
        written = f"{name or 'DistributedDataParallel'}({ast.unparse(value)}{ids})"
        edits = [rewrite.in_place_of(place.file, value, written)] if name else []
        return Fix(f"Wrap it: return {written}.", place, edits)
    if target is None:
        return None
    written = f"{target} = {name or 'DistributedDataParallel'}({target}{ids})"
    may = name is not None and _may_bind(place, target)
    return Fix(
        f"Wrap it after this line: {written}.",
        place,
        [rewrite.after(place.file, node, written)] if may else [],
    )


def _kept(node: ast.stmt | None) -> tuple[str | None, ast.expr | None]:
    """What a statement leaves the model in, and the expression that makes it."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        if isinstance(target, ast.Name | ast.Attribute):
            return ast.unparse(target), node.value
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        moves = isinstance(called, ast.Attribute) and called.attr in _MOVES
        if moves and isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name | ast.Attribute):
            return ast.unparse(called.value), node.value
    if isinstance(node, ast.Return) and node.value is not None:
        return None, node.value
    return None, None


def _may_bind(place: Place, target: str) -> bool:
    """Whether giving a name a new value there reaches those who use it."""
    if "." in target or source.function_at(place.file, place.line) is None:
        return True
    own = source.assignments(place.file, place.line, target)
    return bool(own) or target in source.parameters(place.file, place.line)


def _device(place: Place, value: ast.expr) -> str:
    """The rank's own GPU as the program writes it."""
    for call in ast.walk(value):
        moves = isinstance(call, ast.Call) and source.last_name(call.func) in _MOVES and call.args
        if moves and isinstance(call.args[0], ast.Name | ast.Attribute | ast.Subscript):  # type: ignore[attr-defined]
            return ast.unparse(call.args[0])  # type: ignore[attr-defined]
    scope = set(source.parameters(place.file, place.line))
    for name in _RANKS:
        if name in scope or source.last_assignment(place.file, place.line, name) is not None:
            return name
    return "torch.cuda.current_device()"


def _model_of(made: Place) -> str | None:
    """`model` in an optimizer that is made of `model.parameters()`."""
    for call in source.call_on(made.file, made.line):
        if source.called_name(call) in ("parameters", "named_parameters") and isinstance(
            call.func, ast.Attribute
        ):
            return ast.unparse(call.func.value)
    return None


def _last_binding(made: Place | None, model: str | None) -> Place | None:
    if made is None or model is None:
        return None
    bound = source.last_assignment(made.file, made.line, model)
    return source.place(made.file, bound.lineno) if bound is not None else None


def prepare(made: Place, missing: str) -> Fix | None:
    """accelerate's prepare(), called with other things than this one."""
    for call in source.calls(made.file, "prepare"):
        node = source.statement(made.file, call.lineno)
        given = [ast.unparse(argument) for argument in call.args]
        accelerates = isinstance(call.func, ast.Attribute) and "accelerator" in ast.unparse(call.func.value)
        if not accelerates or missing in given or not isinstance(node, ast.Assign) or node.value is not call:
            continue
        targets = ast.unparse(node.targets[0]).strip("()")
        written = f"{missing}, {targets} = {ast.unparse(call.func)}({', '.join([missing, *given])})"
        place = source.place(made.file, node.lineno)
        return Fix(
            f"Give it to prepare() as well: {written}.",
            place,
            [rewrite.in_place_of(made.file, node, written)] if not call.keywords else [],
        )
    return None


def wrapped_at(file: str, line: int) -> str | None:
    """The name by which the function around a line, or its class, has a model that DDP wraps."""
    for call in source.calls(file, *WRAPPERS):
        node = source.statement(file, call.lineno)
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        here = source.function_at(file, line) is source.function_at(file, call.lineno)
        kept = isinstance(target, ast.Attribute) and source.class_at(file, line) is source.class_at(
            file, call.lineno
        )
        if isinstance(target, ast.Name | ast.Attribute) and (here or kept):
            return ast.unparse(target)
    return None


def imported(file: str, name: str, whole: str) -> str | None:
    """How a file may write a name of torch: as it imports it, else in full; None where it does not import torch."""
    full = None
    for node in source.walk(file):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == name:
                    return alias.asname or alias.name
        elif isinstance(node, ast.Import) and any(
            alias.name.partition(".")[0] == "torch" and alias.asname is None for alias in node.names
        ):
            full = whole
    return full


def distributed(file: str) -> str:
    """How a file may write torch.distributed: by the name that it has imported it under, else in full."""
    for node in source.walk(file):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            whole = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            if whole == "torch.distributed" and (alias.asname or isinstance(node, ast.ImportFrom)):
                return alias.asname or alias.name
    return "torch.distributed"


def device_at(file: str, line: int) -> str | None:
    """A device, or the number of a rank's own GPU, that the program has a name for at a line."""
    scope = source.function_at(file, line) or source.tree(file)
    own = {ast.unparse(n) for n in ast.walk(scope or ast.Pass()) if isinstance(n, ast.Name | ast.Attribute)}
    own |= set(source.parameters(file, line))
    for name in ("device", "dev", "local_rank", "gpu", "local"):
        for text in (name, f"self.{name}", f"args.{name}", f"env.{name}", f"accelerator.{name}"):
            if text in own and ("." in text or is_bound(file, line, name)):
                return text
    return (
        '"cuda"'
        if any(isinstance(n, ast.Attribute) and n.attr == "cuda" for n in source.walk(file))
        else None
    )


def is_bound(file: str, line: int, name: str) -> bool:
    """Whether the function around a line has such a name."""
    return name in source.parameters(file, line) or source.last_assignment(file, line, name) is not None


def rank_as_told(file: str, given: ast.expr) -> Fix | None:
    """The number of a GPU that is an option of the command line or a constant, taken from the launcher instead."""
    place, value = trace.decided(file, given.lineno, given)
    if not isinstance(value, ast.Constant) or not isinstance(value.value, int) or value is given:
        return None
    own = 'int(os.environ.get("LOCAL_RANK", 0))'
    names = {
        alias.asname or alias.name
        for n in source.walk(file)
        if isinstance(n, ast.Import)
        for alias in n.names
    }
    edits = [rewrite.in_place_of(file, value, own)] if "os" in names else []
    said = rewrite.shown(edits) if edits else own
    return Fix(
        f"Take the number that the launcher gives each rank (torchrun sets LOCAL_RANK): {said}", place, edits
    )


def shared_choice(file: str, made: ast.stmt, name: str) -> Fix:
    """Rank 0's choice for all, after a line in which each rank chooses for itself."""
    module = distributed(file)
    code = [f"chosen = [{name}]", f"{module}.broadcast_object_list(chosen, src=0)", f"{name} = chosen[0]"]
    fix = "Let all ranks have the same: draw it from a generator that is seeded alike, or take rank 0's after it: "
    return Fix(
        f"{fix}`{'`, `'.join(code)}`.",
        source.place(file, made.lineno),
        [rewrite.after(file, made, "\n".join(code))],
    )


def _reduced_to_one(file: str, line: int, node: ast.expr, depth: int = 3) -> ast.Call | None:
    """A `reduce` behind an expression: in a function of the file that it calls, or before a name that it reads."""
    for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
        name = source.called_name(call)
        for function in (n for n in source.walk(file) if isinstance(n, source.Function) and n.name == name):
            inside = [c for s in function.body for c in ast.walk(s) if isinstance(c, ast.Call)]
            for inner in inside:
                if source.called_name(inner) == "reduce" and source.keyword(inner, "dst") is not None:
                    return inner
    for name in sorted(source.names_in(node)) if depth else ():
        made = source.last_assignment(file, line, name)
        value = source.value_for(made, name) if made is not None else None
        at = (made.lineno, value) if made is not None and value is not None else None
        if at is not None and (found := _reduced_to_one(file, *at, depth - 1)) is not None:
            return found
    return None


def decided_together(file: str, node: ast.If) -> Fix:
    """A condition that each rank answers for itself, asked of all of them, so that they take the same branch."""
    test = ast.unparse(node.test)
    if (turns := as_many_turns(file, node)) is not None:
        return turns
    if (alone := _reduced_to_one(file, node.lineno, node.test)) is not None:
        kept = [ast.unparse(part) for part in (alone.args[0], *(k for k in alone.keywords if k.arg != "dst"))]
        code = f"{ast.unparse(alone.func).removesuffix('reduce')}all_reduce({', '.join(kept)})"
        said = (
            f"Only rank {ast.unparse(source.keyword(alone, 'dst') or alone)} has what `reduce` gives: {code}."
        )
        return Fix(said, source.place(file, alone.lineno), [rewrite.in_place_of(file, alone, code)])
    if own_figures.of_rank(file, node.lineno, node.test):
        # All would do what one is meant to do alone.
        return Fix(f"Let every rank go on: ask `{test}` only round what prints or writes.")
    device, module = device_at(file, node.lineno), distributed(file)
    flag = f"torch.tensor(float({test}), device={device or 'torch.cuda.current_device()'})"
    # A file has to be there for all of them; anything else, a bad loss or a stop, one rank has for all.
    there = _THERE.search(test) is not None and not test.startswith("not ")
    share = f"{module}.all_reduce(flag, op={module}.ReduceOp.{'MIN' if there else 'MAX'})"
    fix = Fix(f"Decide together: `flag = {flag}`, `{share}`, then `if flag.item():`.")
    other = any(isinstance(n, ast.If) and n.orelse == [node] for n in source.walk(file))
    if device is not None and imports_torch(file) and not other:
        code = f"flag = {flag}\n{share}"
        fix.edits = [rewrite.before(file, node, code), rewrite.in_place_of(file, node.test, "flag.item()")]
    return fix


IN_TURN = "every rank takes its own rounds here, and they do not divide evenly"


def as_many_turns(file: str, node: ast.If) -> Fix | None:
    """As many rounds for every rank where each takes those whose number says so (`if i % world != rank: continue`).

    To decide that together would be to skip every round.
    """
    test = node.test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    skips, sides = isinstance(test.ops[0], ast.NotEq), (test.left, test.comparators[0])
    if not skips and not isinstance(test.ops[0], ast.Eq):
        return None
    for turn, who in (sides, sides[::-1]):
        if not isinstance(turn, ast.BinOp) or not isinstance(turn.op, ast.Mod):
            continue
        if not isinstance(turn.left, ast.Name):
            continue
        if own_figures.of_rank(file, node.lineno, who):
            fix = "Give every rank as many rounds: a DistributedSampler, or leave the rest out"
            rounds = _rounds(file, node, turn.left.id)
            if rounds is None:
                return Fix(f"{fix}.")
            size = rewrite.operand(turn.right)
            code = f"{turn.left.id} {'>=' if skips else '<'} {rounds} // {size} * {size}"
            code = f"{ast.unparse(test)} {'or' if skips else 'and'} {code}"
            return Fix(f"{fix}: `if {code}`.", edits=[rewrite.in_place_of(file, test, code)])
    return None


def _rounds(file: str, node: ast.If, counter: str) -> str | None:
    """How many rounds the loop has that counts by this name, as code: of `enumerate(rows)` or `range(n)`."""
    for loop in (n for n in source.above(file, node) if isinstance(n, ast.For)):
        call = loop.iter
        first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
        counts = isinstance(first, ast.Name) and first.id == counter
        if not counts or not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
            continue
        given, called = call.args[0], source.called_name(call)
        if called == "enumerate" and isinstance(given, ast.Name | ast.Attribute):
            return f"len({ast.unparse(given)})"
        if called == "range":
            return rewrite.operand(given)
    return None


def imports_torch(file: str) -> bool:
    """Whether a file has the name `torch`."""
    nodes = [n for n in source.walk(file) if isinstance(n, ast.Import | ast.ImportFrom)]
    return any((alias.asname or alias.name).split(".")[0] == "torch" for n in nodes for alias in n.names)


def looking_for_unused(at: Place) -> list[Edit]:
    """find_unused_parameters=True, written into the call that wraps."""
    if (call := _call(at)) is None:
        return []
    static = next((k for k in call.keywords if k.arg == "static_graph"), None)
    if static is not None and not source.is_constant(static.value, False):
        start = (static.lineno, static.col_offset)
        end = (static.value.end_lineno or 0, static.value.end_col_offset or 0)
        return [Edit(at.file, start, end, "find_unused_parameters=True")]
    return with_setting(at, "find_unused_parameters", "True")


def with_setting(at: Place, name: str, value: str) -> list[Edit]:
    """A setting of DDP, written into the call that wraps."""
    if (call := _call(at)) is None:
        return []
    old = source.keyword(call, name)
    if old is not None:
        return [rewrite.in_place_of(at.file, old, value)]
    return [rewrite.add_keyword(at.file, call, name, value)]


def frozen_before(at: Place, path: str) -> Fix:
    """The parameters under a path inside the model, frozen in a line before the call that wraps."""
    call, node = _call(at), source.statement(at.file, at.line)
    given = call.args[0] if call is not None and call.args else None
    if isinstance(given, ast.Name | ast.Attribute) and node is not None:
        code = f"{ast.unparse(given)}.{path}.requires_grad_(False)"
        return Fix(code, at, [rewrite.before(at.file, node, code)])
    return Fix(f"{path}.requires_grad_(False)", at, looking_for_unused(at))


def own_gpu(at: Place) -> tuple[str, list[Edit]]:
    """This rank's own GPU as the function around a line calls it, and the edit that names it to DDP."""
    scope = source.function_at(at.file, at.line) or source.tree(at.file)
    nodes = [n for n in ast.walk(scope or ast.Pass()) if isinstance(n, ast.Name | ast.Attribute)]
    texts = {ast.unparse(n) for n in nodes} | set(source.parameters(at.file, at.line))
    names = sorted((text for text in texts if _OWN.fullmatch(text)), key=lambda t: "local" not in t)
    code = names[0] if names else "torch.cuda.current_device()"
    call = _call(at)
    given = source.keyword(call, "device_ids") if call is not None else None
    return code, [rewrite.in_place_of(at.file, given, f"[{code}]")] if given is not None else []


def _call(at: Place) -> ast.Call | None:
    calls = [c for c in source.call_on(at.file, at.line) if source.called_name(c) in WRAPPERS]
    return calls[0] if len(calls) == 1 else None
