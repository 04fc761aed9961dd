"""Data, weights and accounts that cannot be reached from here: no fault of the program's use of GPUs.

Known by the class of the error (libraries are never imported for it) or by what it says. Says what was asked for and
what to do; it never looks for the data itself.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import traceback
from collections.abc import Sequence

from trimtab.diagnose import source
from trimtab.diagnose.finding import Finding, Place
from trimtab.rehearse.lacking import words

_MODULES = re.compile(
    r"^(?:requests|urllib3?|http\.client|httpx|httpcore|aiohttp|botocore|boto3|s3transfer|fsspec|s3fs|gcsfs|"
    r"google\.(?:api_core|auth|cloud)|azure|wandb|huggingface_hub|datasets\.exceptions|kagglehub|gdown|minio|"
    r"smart_open|mlflow|comet_ml|neptune|clearml)\b"
)
_CLASSES = re.compile(
    r"HTTP|Http|URLError|Offline|NotFound|Gated|Repository|Entry|Connect|Timeout|Credential|Endpoint|Proxy|SSL|Network|"
    r"Transport|Auth|CommError|UsageError|Remote|ClientError|Retr|Refused|Disabled|Forbidden|RequestException"
)
_TALKS = re.compile(
    r"/(?:socket|ssl|http/client|urllib/request|ftplib|asyncio/\w+)\.py$|"
    r"/(?:requests|urllib3|httpx|httpcore|aiohttp|botocore|fsspec|s3fs|huggingface_hub|datasets)/"
)
"""Files that speak to the network: an error of a connection elsewhere may be that of another process."""
_SAID = re.compile(
    r"couldn't connect to|Couldn't reach|offline mode is enabled|Offline mode|outgoing traffic has been disabled|"
    r"is not a local folder and is not a valid model identifier|Can't load (?:the configuration|tokenizer|the model) |"
    r"doesn't exist on the Hub|Dataset not found|not found or corrupted|Max retries exceeded|Failed to resolve|"
    r"Name or service not known|Temporary failure in name resolution|Network is unreachable|No route to host|"
    r"Unable to locate credentials|\[E050\]|Please use the NLTK Downloader|api_key not configured|"
    r"Repo id must [^\n]*'[./~][^']*'|"
    r"wandb login|Cannot find the requested files in the (?:cached path|disk cache)|Invalid credentials|gated repo",
    re.I,
)
_WRITES = words(
    "mkdir makedirs save savefig to_csv to_json to_parquet save_pretrained write_text write_bytes dump"
)
_HUB = re.compile(r"hugging ?face|on the Hub|HF_HUB|\btransformers\b|(?<![\w./-])datasets(?![\w-])", re.I)
"""Not what only lies in a folder of that name, or is loaded by torchvision.datasets."""


def is_unreachable(error: BaseException) -> bool:
    """Whether an error says that something outside the program is not to be had."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        command = bool(files) and files[-1].endswith("subprocess.py")
        return not command and not _its_own(error)
    if isinstance(error, OSError | RuntimeError | ValueError | LookupError) and _SAID.search(str(error)):
        return True
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ == "gaierror":
        return any(_TALKS.search(file) for file in files)
    return any(
        _MODULES.match(kind.__module__) and _CLASSES.search(kind.__name__) for kind in type(error).__mro__
    )


def finding_for(errors: Sequence[BaseException], stack: Sequence[Place], where: Place | None) -> Finding:
    """What is told: the first words, what was asked for, the program's line, and how to have the data there."""
    error = errors[0]
    if isinstance(error, SystemExit) and len(errors) > 1:
        error = errors[1]
    asked, fix = _asked_and_fix(errors)
    said = f"{type(error).__name__}: {error}"
    library = stack[0] if stack and not source.is_user_file(stack[0].file) and where is not None else None
    return Finding(
        kind="data-unreachable",
        severity="warning",
        message=said if not asked or asked in said else f"{said}\nIt asked for {asked}.",
        where=where,
        fix=fix,
        library=library,
    )


def _asked_and_fix(errors: Sequence[BaseException]) -> tuple[str, str]:
    said = " ".join(f"{type(error).__module__} {error}" for error in errors)
    missing = next((str(e.filename) for e in errors if isinstance(e, OSError) and e.filename), "")
    if missing and any(isinstance(error, FileNotFoundError | NotADirectoryError) for error in errors):
        return missing, _for_a_file(missing)
    if named := re.search(r"Repo id must [^\n]*'([./~][^']*)'", said):
        return named[1], f"there is no folder {named[1]} here: put it there, or give the path of one that is"
    if "wandb" in said:
        return "", "no account is needed to rehearse: set WANDB_MODE=offline (or disabled) for the rehearsal"
    if _HUB.search(said):
        name = _held(
            errors, ("repo_id", "pretrained_model_name_or_path", "path_or_repo_id"), r"[\w.-]+(/[\w.-]+)?"
        )
        quoted = re.search(r"'([\w.-]+/[\w.-]+)'", said)
        name = name or (quoted[1] if quoted else "")
        offline = " (HF_HUB_OFFLINE is set here)" if os.environ.get("HF_HUB_OFFLINE") else ""
        return name, (
            f"download it where there is a network (hf download {name or 'NAME'}) and point HF_HOME at that cache, or "
            f"give the path of the folder instead of the name, or let the rehearsal reach the network{offline}"
        )
    found = re.search(r"(?:https?|s3|gs|ftp)://[^\s'\"<>)]+", said)
    url = found[0].rstrip(",.;:") if found else _held(errors, ("url", "fullurl", "full_url"), r"\w+://.+")
    if url:
        return url, f"download {url} beforehand and give its path, or let the rehearsal reach it"
    return "", (
        "put the data on this machine beforehand and give its path, or let the rehearsal reach the network; a few rows "
        "are enough"
    )


def _held(errors: Sequence[BaseException], names: Sequence[str], form: str) -> str:
    """What the functions on the way to the error held under one of these names, the outermost first."""
    for error in errors:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            for name in names:
                value = frame.f_locals.get(name)
                if isinstance(value, str) and re.fullmatch(form, value):
                    return value
    return ""


def _for_a_file(path: str) -> str:
    given = next((word for word in sys.argv[1:] if word.partition("=")[2] == path or word == path), None)
    said = f"it was given as {given!r}: " if given else ""
    return (
        f"{said}put {path} there, or give the path of a small sample of it; a few rows are enough to rehearse"
    )


def _its_own(error: BaseException) -> bool:
    """Whether the program was to write the file itself, here or at another line: then that is its own fault."""
    own = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if source.is_user_file(frame.f_code.co_filename)
    ]
    if not own:
        return False
    file, line = own[-1]
    reading = list(source.call_on(file, line))
    if any(_writes(call) for call in reading):
        return True
    missing = str(getattr(error, "filename", None) or "")
    named = set().union(*(_named(call) for call in reading))
    return any(
        _writes(call) and (_named(call) & named or any(text in missing for text in _texts(call)))
        for call in source.calls(file)
    )


def _writes(call: ast.Call) -> bool:
    name = source.called_name(call)
    modes = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "mode")]
    to_write = any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax") for mode in modes)
    return name in _WRITES or (name == "open" and to_write)


def _named(call: ast.Call) -> set[str]:
    """What is handed over by name, or under a name: the path is among them."""
    found = {
        ast.unparse(argument) for argument in call.args if isinstance(argument, ast.Name | ast.Attribute)
    }
    return found | {ast.unparse(word.value) for word in call.keywords if isinstance(word.value, ast.Name)}


def _texts(call: ast.Call) -> set[str]:
    nodes = (node for argument in call.args for node in ast.walk(argument))
    found = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {text for text in found if len(text) > 3}
