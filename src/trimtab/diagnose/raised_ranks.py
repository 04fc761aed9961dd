"""Errors of one rank among several: a list of parts that only one may give, a file that another rank has yet to write.

Reads the source of the failing lines; runs nothing.
"""

from __future__ import annotations

import ast
import re

from trimtab.diagnose import branches, loops_left, mends_ranks, rewrite, source
from trimtab.diagnose.own_figures import RANK
from trimtab.diagnose.raised_common import own_frames
from trimtab.diagnose.rules_common import Verdict

_LISTS = {
    "gather": ("gather_list", "dst"),
    "gather_object": ("object_gather_list", "dst"),
    "scatter": ("scatter_list", "src"),
}
_WRITERS = {"save", "dump", "makedirs", "mkdir", "savez", "copy", "move", "download", "urlretrieve"}
_WRITERS |= {"extractall", "to_csv", "to_parquet", "to_json", "save_pretrained", "save_to_disk"}
_WRITERS |= {"write_text", "write_bytes"}


def list_of_parts(error: BaseException) -> Verdict | None:
    """The list of all parts, given by the rank that collects and None by the others."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        for call in (c for c in source.call_on(file, line) if source.called_name(c) in _LISTS):
            keyword, root = _LISTS[source.called_name(call)]
            parts = source.keyword(call, keyword) or (call.args[1] if len(call.args) > 1 else None)
            given = source.keyword(call, root) or (call.args[2] if len(call.args) > 2 else None)
            if parts is None:
                continue
            who = ast.unparse(given) if given is not None else "0"
            code = f"{ast.unparse(parts)} if {mends_ranks.distributed(file)}.get_rank() == {who} else None"
            why = "every rank gives the list of all parts here, and only one may"
            edits = [rewrite.in_place_of(file, parts, code)]
            fix = f"Give the list on that rank alone: {keyword}={code}."
            return Verdict(source.cause(file, line, why), fix, edits=edits)
    return None


def built_of_own_rows(error: BaseException) -> Verdict | None:
    """A model whose sizes hang on what each rank has of the rows: the line that counts them there."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        asked = ast.List([*source.call_on(file, line)], ast.Load())
        for name, made, value in loops_left.followed_back(file, line, asked):
            for read in sorted(source.names_in(value)) if made is not None and value is not None else ():
                part = source.last_assignment(file, made.lineno if made is not None else line, read)
                taken = source.value_for(part, read) if part is not None else None
                sliced = loops_left.part_of_rank(file, taken) if taken is not None else None
                if made is None or value is None or part is None or taken is None or sliced is None:
                    continue
                why = (
                    f"computed from `{read}`, of which every rank has a part of its own (line {part.lineno})"
                )
                code = re.sub(
                    rf"\b{read}\b", ast.unparse(getattr(sliced, "value", taken)), ast.unparse(value)
                )
                edits = [rewrite.in_place_of(file, value, code)]
                fix = f"Compute it from all rows: {name} = {code}."
                return Verdict(source.cause(file, made.lineno, why), fix, edits=edits)
    return None


def not_written_yet(error: BaseException) -> Verdict | None:
    """A file that is missing here because the rank that writes it has not come so far: nothing makes this one wait."""
    for frame, line in own_frames(error):
        file = frame.f_code.co_filename
        for node in branches.rank_conditions_before(file, line):
            between = range((node.end_lineno or node.lineno) + 1, line + 1)
            waits = [c for c in source.calls(file) if c.lineno in between and _waits(c)]
            if waits or not _writes(file, node):
                continue
            barrier = f"{mends_ranks.distributed(file)}.barrier()"
            test = ast.unparse(node.test)
            why = "one rank writes the file under this, and the others go on to read it at once"
            fix = f"Let the others wait for it, after `if {test}:` {barrier}."
            return Verdict(
                source.cause(file, node.lineno, why),
                fix,
                "ranks-disagree",
                [rewrite.after(file, node, barrier)],
            )
    return None


def _waits(call: ast.Call) -> bool:
    name = source.called_name(call)
    return name in ("barrier", "wait_for_everyone", "monitored_barrier", "all_reduce", "broadcast") or bool(
        RANK.search(name) and "first" in name
    )


def _writes(file: str, node: ast.AST, depth: int = 2) -> bool:
    """Whether something writes a file, itself or in a function of the same file that it calls."""
    for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
        name = source.called_name(call)
        modes = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
        opens = name == "open" and any(set(str(getattr(m, "value", ""))) & set("wax") for m in modes)
        if opens or name in _WRITERS:
            return True
        inner = [n for n in source.walk(file) if isinstance(n, source.Function) and n.name == name]
        if depth and any(_writes(file, function, depth - 1) for function in inner):
            return True
    return False
