"""Writes a Modelfile and hands it to `ollama create` where Ollama is installed.

It never downloads or starts Ollama.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path

from trimtab.errors import RequestError, TrimtabError
from trimtab.export.chat_template import OllamaChat

DEFAULT_CONTEXT = 4096
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+){0,2}(:[A-Za-z0-9._-]+)?")


def check_name(name: str) -> None:
    """Raise RequestError for a name that Ollama would refuse."""
    if not MODEL_NAME.fullmatch(name):
        raise RequestError.of(
            f"--name {name!r}: not a name that Ollama takes",
            "it is [owner/]model[:tag] of letters, digits, dots, dashes and underscores",
            "choose another --name",
        )


def model_name(text: str) -> str:
    """A valid model name made from any text, such as a run folder's name."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._") or "trimtab-model"


def modelfile(
    weights: str,
    chat: OllamaChat,
    *,
    num_ctx: int,
    temperature: float | None = None,
    system: str | None = None,
    license_name: str | None = None,
) -> str:
    """The Modelfile's text."""
    lines = [f"FROM ./{weights}", f"TEMPLATE {_quoted('TEMPLATE', chat.template)}"]
    lines += [f"PARAMETER stop {_quoted('stop', stop)}" for stop in chat.stops]
    lines.append(f"PARAMETER num_ctx {num_ctx}")
    if temperature is not None:
        lines.append(f"PARAMETER temperature {temperature:g}")
    if system is not None:
        lines.append(f"SYSTEM {_quoted('SYSTEM', system)}")
    if license_name:
        lines.append(f"LICENSE {_quoted('LICENSE', license_name)}")
    return "\n".join(lines) + "\n"


def _quoted(key: str, text: str) -> str:
    """Quoted as Ollama's parser reads it: it knows no escapes, and drops what does not print."""
    drops = ("Zs", "Zl", "Zp", "Cc", "Cf", "Co", "Cn", "Cs")
    unprintable = [c for c in text if c not in " \t\n" and unicodedata.category(c) in drops]
    if '"""' in text or unprintable:
        found = "three double quotes" if '"""' in text else f"the character U+{ord(unprintable[0]):04X}"
        raise RequestError.of(
            f"{key} of the Modelfile: the text holds {found}",
            "a Modelfile cannot hold it: its parser would cut or change the text",
            "remove it from the system text or from the chat template",
        )
    marks = '"""' if "\n" in text or '"' in text or key in ("TEMPLATE", "SYSTEM") else '"'
    return f"{marks}{text}{marks}"


def create_command(folder: Path, name: str) -> list[str]:
    """The command that makes the model known to Ollama."""
    return ["ollama", "create", name, "-f", str(folder / "Modelfile")]


def create(folder: Path, name: str, say: Callable[[str], None]) -> bool:
    """Run `ollama create` when `ollama` is on the PATH; False when it is not there."""
    if shutil.which("ollama") is None:
        return False
    command = create_command(folder, name)
    say(shlex.join(command))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise TrimtabError(
            f"`{shlex.join(command)}` failed\n  why: {output}\n"
            f"  change: start Ollama (`ollama serve`) and run the command again; the files in {folder} are complete"
        )
    return True
