"""Why nothing of a program ran on a GPU, as far as its source tells: the line that chose the device, the option for it.

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
