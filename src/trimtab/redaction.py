"""How a secret looks in a text, and the text without it: by its form, by its name, and by its value where we know it.

The values are those of variables whose names say so, and what the usual files of credentials hold; they are looked up
to be hidden and for nothing else. Never shows what it found. Stands beside the rooms and needs no package: whatever
prints an error, also in a broken installation, can hide with it. Takes time in proportion to the text, whatever the
text: what is shown may be what a stranger wrote. Hiding twice is hiding once.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote, unquote

HIDDEN = "(not shown)"
# What may be a key is hidden; a name such as `hf_hub_download` in a line of code is none.
_SECRET_VALUE = re.compile(
    r"\b(?:(?:hf|gh[pousr])_[A-Za-z0-9]{12,}|(?:sk-|github_pat_)[\w-]{12,}|(?:AKIA|ASIA)[\w-]{12,})"
)
# Whole keys, as the services make them: `hf_answers_of_last_week.jsonl` is none.
_WHOLE_KEY = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{36,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|sk-(?=[\w-]{0,256}?\d)(?=[\w-]{0,256}?[A-Z])[\w-]{32})"
)
# No pattern below may begin inside of what it has run over in vain: that makes time grow with the square of a text.
_UNBROKEN = re.compile(r"""[^\s'"]+""")
_USER = re.compile(r"[^/?#:@]*+:")
_PORT = re.compile(r"\d{1,5}(?:[/?#]|$)")
_BEFORE_PATH = re.compile(r"[^/?#]*+")
# A parameter whose name has such a word in it. A name begins after an `&`, or after the first `?` of what is unbroken.
_URL_SIGNATURE = re.compile(
    r"(?<![^=&\s])((?:(?<=&)|[^=&\s?]*+\?)(?=[^=&\s]*?(?:token|secret|passw|credential|key|sig))[^=&\s]*+=)"
    r"(?:\(not shown\)|[^&\s'\"])++",
    re.I,
)


# `Authorization: Bearer …`, `aws_secret_access_key = …`: what stands beside its name. `pad_token` is none.
_NAMED = re.compile(
    r"""((?:\b|_)(?:authorization|(?:proxy|x)-[\w-]{0,32}?auth\w{0,32}|cookie|passw(?:or)?d|passphrase|client[_-]?secret
    |secret(?:[_-]?(?:access)?[_-]?key)?|api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key|account[_-]?key
    |(?:access|auth|api|hf|hub|bearer|refresh|session|security|id)[_-]?token)
    ["']?\s*+(?:=|:|=>)\s*+["']?+(?:(?:bearer|basic|token)\s++)?+)(?:(?>\(not\ shown\)|[^\s"',;&)\]}])){6,}""",
    re.I | re.X,
)
_SECRET_WORD = re.compile(
    r"(?:^|_)(?:PASS|PAT|AUTH|COOKIE|BEARER|SAS|JWT|DSN)(?:_|$)|(?:TOKEN|PASSWORD|PASSWD|PASSPHRASE|KEY)(?:_|$)"
    r"|SECRET|CREDENTIAL|(?:ACCESS|API)_?KEY"
)
_OTHER_END = re.compile(r"_(?:FILE|FILES|PATH|DIR|SOCK|SOCKET|HOME|NAME|TYPE|URL|URI|HOST|PORT|USER)$")
_STORED = re.compile(
    r"^[^\S\n]*+(?:aws_secret_access_key|aws_session_token|aws_access_key_id)\s*=\s*(\S+)"
    r"|\bpassword\s+(\S+)",
    re.M | re.I,
)
_LARGEST_STORE = 1 << 16


def without_secrets(text: str) -> str:
    """The text without what is or may be a secret."""
    return hiding()(text)


def hiding() -> Callable[[str], str]:
    """`without_secrets` for many texts: the values are looked up once, here."""
    values = sorted({form for value in _values() for form in _written(value)}, key=len, reverse=True)
    known = re.compile("|".join(map(re.escape, values))) if values else None

    def hide(text: str) -> str:
        text = _without_logins(text)
        # Whole values before what goes by a form, which might leave the rest of one.
        if known is not None:
            text = known.sub(HIDDEN, text)
        text = _URL_SIGNATURE.sub(rf"\1{HIDDEN}", text)
        return _NAMED.sub(rf"\1{HIDDEN}", _SECRET_VALUE.sub(HIDDEN, text))

    return hide


def strong_secrets() -> list[tuple[str, set[str]]]:
    """Variables with a secret, and its forms. Short or simple values, which many a text holds, are left out."""
    return [(name, _written(value)) for name, value in _of_environment() if _is_strong(value)]


def secret_variable_in(text: str, held: Sequence[tuple[str, set[str]]] | None = None) -> str | None:
    """The variable whose secret stands in the text; `held`: for many texts, the secrets as they were looked up once."""
    for name, forms in strong_secrets() if held is None else held:
        if any(form in text for form in forms):
            return name
    return None


def names_a_secret(variable: str) -> bool:
    """Whether a variable of the environment holds a secret, by its name."""
    name = re.sub(r"\W", "_", variable).upper()
    return _SECRET_WORD.search(name) is not None and _OTHER_END.search(name) is None


def _without_logins(text: str) -> str:
    return _UNBROKEN.sub(lambda found: _without_login(found[0]), text) if "://" in text else text


def _without_login(address: str) -> str:
    """After `user:` up to the last @, also over slashes, which passwords may hold and ports do not; else before the
    path."""
    last, at, shown = address.rfind("@"), address.find("://"), 0
    pieces = []
    while 0 <= at < last:
        start = at + len("://")
        user, host = _USER.match(address, start), _BEFORE_PATH.match(address, start)
        end = -1
        if user and user.end() <= last and not _PORT.match(address, user.end()):
            end = last
        elif host:
            end = address.rfind("@", start, host.end())
        if end >= 0:
            pieces += [address[shown:start], HIDDEN]
            shown = end
        at = address.find("://", max(start, end))
    return "".join([*pieces, address[shown:]])


def _password_in(value: str) -> str | None:
    """The password of an address, `://user:password@host`."""
    for address in value.split():
        last, at = address.rfind("@"), address.find("://")
        while 0 <= at < last:
            user = _USER.match(address, at + len("://"))
            if user and user.end() < last:
                return address[user.end() : last]
            at = address.find("://", at + len("://"))
    return None


def _values() -> Iterator[str]:
    yield from (value for _, value in _of_environment())
    for path in _stores():
        yield from _stored_in(*path)


def _of_environment() -> Iterator[tuple[str, str]]:
    """Variables with a secret in them, and the secret: the whole value, or the password of an address."""
    for name, value in os.environ.items():
        password = _password_in(value)
        if password is not None:
            yield name, password
        if names_a_secret(name) and _could_be(value.strip()):
            yield name, value.strip()


def _could_be(value: str) -> bool:
    """Whether a value is more than a word, a switch or a path: hiding those would garble every text."""
    if len(value) < 6 or (value.startswith(("/", "~", "./")) and os.path.exists(os.path.expanduser(value))):
        return False
    return len(value) >= 12 or not value.isalpha()


def _is_strong(value: str) -> bool:
    kinds = sum(any(map(test, value)) for test in (str.islower, str.isupper, str.isdigit))
    return len(value) >= 16 or (len(value) >= 12 and kinds > 1)


def _written(value: str) -> set[str]:
    """The value as texts have it: as it is, in JSON or a string of Python, in an address; a key file by its lines."""
    lines = [line.strip() for line in value.splitlines() if len(line.strip()) >= 12]
    forms = {value, *(lines if len(lines) > 1 else ())}
    forms |= {json.dumps(form)[1:-1] for form in forms} | {repr(form)[1:-1] for form in forms}
    return {
        f for form in forms for f in (form, quote(form, safe=""), quote(form), unquote(form)) if len(f) >= 6
    }


def _stores() -> list[tuple[Path, int]]:
    """The usual files of credentials that are there, each with the time of its last change."""
    home = Path(os.path.expanduser("~"))
    hub = Path(os.environ.get("HF_HOME") or home / ".cache" / "huggingface") / "token"
    places = [
        Path(os.environ.get("HF_TOKEN_PATH") or hub),
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials"),
        Path(os.environ.get("NETRC") or home / ".netrc"),
    ]
    found = []
    for place in places:
        try:
            about = place.stat()
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(about.st_mode) and about.st_size <= _LARGEST_STORE:
            found.append((place, about.st_mtime_ns))
    return found


@lru_cache(maxsize=16)
def _stored_in(path: Path, changed: int) -> tuple[str, ...]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()  # what we may not read, no message of ours can hold
    found = [text.strip()] if path.name == "token" else [a or b for a, b in _STORED.findall(text)]
    return tuple(value for value in found if _could_be(value))


def has_login(address: str) -> bool:
    """Whether an address has a login in it: `https://user:password@host`."""
    return _without_logins(address) != address


def has_signature(address: str) -> bool:
    """Whether an address has a key or a signature among its parameters: `https://host/file?X-Amz-Signature=…`."""
    return _URL_SIGNATURE.search(address) is not None


def has_key(text: str) -> bool:
    """Whether a whole access key or token stands in the text, told by its form."""
    return _WHOLE_KEY.search(text) is not None
