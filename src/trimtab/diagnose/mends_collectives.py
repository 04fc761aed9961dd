"""What to write where ranks exchange something: equal sizes and types, a GPU for each rank, FSDP's own clipping. Reads
source, runs nothing; changes no file."""

from __future__ import annotations

import ast
import re

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.branches import Said, Way
from trimtab.diagnose.finding import Edit, Place
from trimtab.diagnose.mends_ranks import Fix, distributed, own_gpu, rank_as_told

RANKS = re.compile(r"rank|gpu|local")


def padded(at: Place | None, one: list[int] | None, other: list[int] | None) -> Fix | None:
    """What is gathered, padded to the longest of all ranks before it is used in the function that gathers."""
    if at is None or one is None or other is None or len(one) != len(other):
        return None
    apart = [n for n, (left, right) in enumerate(zip(one, other, strict=True)) if left != right]
    call = next((c for c in source.call_on(at.file, at.line) if len(c.args) > 1), None)
    given = call.args[1] if call is not None else None
    function = source.function_at(at.file, at.line)
    if len(apart) != 1 or not isinstance(given, ast.Name) or function is None:
        return None
    name, dim, module = given.id, apart[0], distributed(at.file)
    behind = ", ".join(["0"] * (2 * (len(one) - 1 - dim)) + ["0", f"longest.item() - {name}.size({dim})"])
    code = [
        f"longest = torch.tensor({name}.size({dim}), device={name}.device)",
        f"{module}.all_reduce(longest, op={module}.ReduceOp.MAX)",
        f"{name} = torch.nn.functional.pad({name}, ({behind}))",
    ]
    made = source.last_assignment(at.file, at.line, name)
    text = "\n".join(code)
    inside = made is not None and source.function_at(at.file, made.lineno) is function
    edit = rewrite.after(at.file, made, text) if inside and made is not None else None
    edit = edit or rewrite.before(at.file, function.body[0], text)
    return Fix(f"Pad to the longest of all ranks first: {'; '.join(code)}.", at, [edit])


def padded_by_accelerate(at: Place | None, one: list[int] | None, other: list[int] | None) -> Fix | None:
    """The same by what accelerate has for it, where one of its gathers is called."""
    if at is None or one is None or other is None or len(one) != len(other):
        return None
    apart = [n for n, (left, right) in enumerate(zip(one, other, strict=True)) if left != right]
    called = next(source.methods_on(at.file, at.line, "gather", "gather_for_metrics"), None)
    statement = source.statement(at.file, at.line)
    if called is None or statement is None or len(apart) != 1:
        return None
    call, holder = called
    given = call.args[0] if call.args else None
    if "accelerat" not in source.last_name(holder).lower() or not isinstance(given, ast.Name):
        return None
    code = f"{given.id} = {ast.unparse(holder)}.pad_across_processes({given.id}, dim={apart[0]})"
    edit = rewrite.before(at.file, statement, code)
    return Fix(
        f"Pad to the longest of all ranks first: {code} (pad_index= the padding's number).", at, [edit]
    )


def of_type(at: Place, dtype: str) -> Fix:
    """A tensor that is made on a line, made of the type that the other ranks have."""
    for call, _ in source.methods_on(at.file, at.line, "load_state_dict"):
        if (assigned := source.keyword(call, "assign")) is not None:
            taken = f"`assign={ast.unparse(assigned)}` puts the file's tensors, with their type, in the weights' place"
            return Fix(
                f"{taken}: leave it out, so that their values are copied into weights of torch.{dtype}, or cast the "
                f"model afterwards: .to(torch.{dtype}).",
                at,
            )
    fix = f"Make it of the type that the other ranks give: dtype=torch.{dtype}"
    node = source.statement(at.file, at.line)
    made = rewrite.factory_calls(node) if node is not None else []
    if len(made) == 1 and source.keyword(made[0], "dtype") is None:
        code = rewrite.with_keyword(at.file, made[0], "dtype", f"torch.{dtype}")
        return Fix(f"{fix}: {code}.", at, [rewrite.add_keyword(at.file, made[0], "dtype", f"torch.{dtype}")])
    return Fix(f"{fix}.", at)


def as_many_objects(at: Place | None, counts: dict[int, int]) -> Said | None:
    """Lists of objects that are not equally long: torch first exchanges one size for each. `counts`: by rank."""
    if at is None:
        return None
    for call in source.call_on(at.file, at.line):
        if source.called_name(call) != "broadcast_object_list":
            continue
        given = source.keyword(call, "object_list") or next(iter(call.args), None)
        name = source.root(given) if given is not None else ""
        made = source.last_assignment(at.file, at.line, name) if name else None
        lists = ", ".join(f"one of {count} on rank {rank}" for rank, count in counts.items())
        cause = source.cause(
            at.file,
            made.lineno if made is not None else at.line,
            f"`{name}` is a list of another length on each rank: {lists}",
        )
        most = max(counts.values())
        fix = f"Make it equally long on every rank: `{name} = [None] * {most}` where it is only to be filled."
        return Said(cause, fix)
    return None


def one_root(at: Place | None) -> Said | None:
    """A root that is each rank's own number: one rank has to be it for all."""
    for call in source.call_on(at.file, at.line) if at is not None else ():
        root = source.keyword(call, "src") or source.keyword(call, "dst") or next(iter(call.args[1:]), None)
        if at is None or root is None or isinstance(root, ast.Constant):
            continue
        why = f"`{ast.unparse(root)}` is another one on every rank, and all of them have to name the same"
        code = rewrite.text_of(at.file, call).replace(rewrite.text_of(at.file, root), "0", 1)
        named = next((k.arg for k in call.keywords if k.value is root), None)
        if named is not None:
            code = rewrite.text_of(at.file, call).replace(
                f"{named}={rewrite.text_of(at.file, root)}", f"{named}=0"
            )
        edits = [rewrite.in_place_of(at.file, root, "0")]
        return Said(source.cause(at.file, at.line, why), f"Name one rank for all: {code}.", edits)
    return None


def told_rank(way: Way) -> Fix | None:
    """The number of a GPU that every rank takes from the same option or constant, behind the line that chose it."""
    for file in dict.fromkeys(file for file, _ in way):
        for call in source.calls(file, "set_device", "device", "cuda", "to"):
            for given in (a for a in call.args if isinstance(a, ast.Name | ast.Attribute)):
                sounds = RANKS.search(ast.unparse(given).rpartition(".")[2])
                if sounds and (told := rank_as_told(file, given)) is not None:
                    return told
        named = [n for n in source.walk(file) if isinstance(n, ast.Constant) and n.value == "cuda:0"]
        if len(named) == 1:
            name, _ = own_gpu(source.place(file, named[0].lineno))
            code = f'f"cuda:{{{name}}}"'
            at = source.place(file, named[0].lineno)
            edits = [rewrite.in_place_of(file, named[0], code)]
            said = rewrite.shown(edits)
            return Fix(f"Name each rank's own GPU in place of the first one: {said}", at, edits)
    return None


SET_DEVICE = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'


def own_device(file: str) -> list[Edit]:
    """Each rank's own GPU, chosen where the process group is made; nothing where that file chooses one already."""
    calls = source.calls(file, "init_process_group")
    names = {
        alias.asname or alias.name
        for n in source.walk(file)
        if isinstance(n, ast.Import)
        for alias in n.names
    }
    node = source.statement(file, calls[0].lineno) if len(calls) == 1 else None
    if node is None or not {"os", "torch"} <= names or source.calls(file, "set_device"):
        return []
    return [rewrite.before(file, node, SET_DEVICE)]


def clip_whole(at: Place | None) -> Fix:
    """FSDP's own clipping in place of torch.nn.utils'."""
    for call in source.call_on(at.file, at.line) if at is not None else ():
        given = call.args[0] if call.args else None
        if source.called_name(call) != "clip_grad_norm_" or not isinstance(given, ast.Call) or at is None:
            continue
        if source.called_name(given) == "parameters" and isinstance(given.func, ast.Attribute):
            model = ast.unparse(given.func.value)
            rest = ", ".join(ast.unparse(part) for part in (*call.args[1:], *call.keywords))
            code = f"{model}.clip_grad_norm_({rest})"
            fix = f"Let FSDP clip by the norm over all ranks: {code}."
            return Fix(fix, at, [rewrite.in_place_of(at.file, call, code)])
    return Fix(
        "Let FSDP clip by the norm over all ranks: call clip_grad_norm_ of the outermost FSDP module.", at
    )
