"""Why nothing of a program ran on a GPU, as far as its source tells: the line that chose the device, the option for it,
or that the program asks for the CPU in so many words.

Only reads the files of the modules that were imported; decides nothing.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator

from trimtab.diagnose import source

_OPTION = re.compile(r"^--?(?:no[-_])?(?:use[-_])?(?:cuda|gpus?|accel|accelerator|cpu|device|mps)$")
_DEVICES = ("cuda", "cpu", "mps", "xpu", "accelerator", "device")


def reason() -> str:
    """What the program's own files say of the device; nothing when they say nothing."""
    if "torch" not in sys.modules:
        return "torch was not even imported"
    files = list(_own_files())
    said = []
    choice = next((found for file in files if (found := _choice(file)) is not None), None)
    if choice is not None:
        file, statement = choice
        place = source.place(file, statement.lineno)
        said.append(f"the device is chosen at {os.path.basename(file)}:{place.line}: {place.code}")
        text = ast.unparse(statement)
        if "mps" in text and "cuda" not in text:
            said.append("which asks for Apple's GPU, not for CUDA")
    options = [name for file in files for name in _options(file)]
    if options:
        said.append(f"see its own {'option' if len(options) == 1 else 'options'} {', '.join(options[:3])}")
    return "; ".join(said)


def wanted() -> str:
    """Where the program itself asks for the CPU, whatever the machine has; nothing when it does not.

    A default of its command line does not count: whoever rehearses can give the option.
    """
    if "torch" not in sys.modules:
        return ""
    for file in _own_files():
        options = source.calls(file, "add_argument", "option", "Option")
        # What stands beside a question ("cuda" if torch.cuda.is_available() else "cpu") is not asked for.
        beside = [node for node in source.walk(file) if isinstance(node, ast.IfExp | ast.BoolOp)]
        left_out = {id(inner) for node in (*options, *beside) for inner in ast.walk(node)}
        for node in source.walk(file):
            if id(node) not in left_out and _asks_for_cpu(node):
                return f"{os.path.basename(file)}:{node.lineno}"  # type: ignore[attr-defined]
    return ""


def _asks_for_cpu(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        # A setting from outside that is the CPU unless it is given.
        value = node.value
        read = isinstance(value, ast.Call) and source.called_name(value) in ("get", "getenv")
        return _is_cpu(value) or (read and any(_is_cpu(argument) for argument in value.args[1:]))  # type: ignore[union-attr]
    if isinstance(node, ast.Dict):
        named = zip(node.keys, node.values, strict=True)
        return any(isinstance(k, ast.Constant) and "device" in str(k.value) and _is_cpu(v) for k, v in named)
    if not isinstance(node, ast.Call):
        return False
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if source.called_name(node) == "init_process_group":
        backend = given.get("backend", node.args[0] if node.args else None)
        return isinstance(backend, ast.Constant) and backend.value == "gloo"
    if any(_is_true(given.get(name)) for name in ("use_cpu", "cpu", "no_cuda")):
        return True
    moves = source.called_name(node) in ("to", "device", "set_default_device") and len(node.args) == 1
    return _is_cpu(given.get("device")) or (moves and _is_cpu(node.args[0]))


def _is_cpu(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == "cpu"


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _own_files() -> Iterator[str]:
    """The files of the program, the script itself first."""
    first = getattr(sys.modules.get("__main__"), "__file__", None)
    others = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    for file in dict.fromkeys(filter(None, (first, *others))):
        if file.endswith(".py") and source.is_user_file(file):
            yield file


def _choice(file: str) -> tuple[str, ast.stmt] | None:
    """The first statement that sets something called a device to a device, or to what an option says."""
    for node in source.walk(file):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any("device" in source.last_name(target).lower() for target in targets) and _is_device(node.value):
            return file, node
    return None


def _is_device(value: ast.expr) -> bool:
    words = {node.value for node in ast.walk(value) if isinstance(node, ast.Constant)}
    if any(isinstance(word, str) and word.partition(":")[0] in _DEVICES for word in words):
        return True
    return any(source.last_name(node) in ("device", "is_available") for node in ast.walk(value))


def _options(file: str) -> Iterator[str]:
    for call in source.calls(file, "add_argument", "option", "Option"):
        for argument in call.args:
            if isinstance(argument, ast.Constant) and _OPTION.match(str(argument.value)):
                yield str(argument.value)
