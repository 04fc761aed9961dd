"""How a secret looks in a text, and the text without it. Never shows what it found.

Stands beside the rooms and needs no package: whatever prints an error, also in a broken installation, can hide with it.
"""

from __future__ import annotations

import re

# What may be a key is hidden; a name such as `hf_hub_download` in a line of code is none.
_SECRET_VALUE = re.compile(
    r"\b(?:(?:hf|gh[pousr])_[A-Za-z0-9]{12,}|(?:sk-|github_pat_)[\w-]{12,}|(?:AKIA|ASIA)[\w-]{12,})"
)
# Whole keys, as the services make them: `hf_answers_of_last_week.jsonl` is none.
_WHOLE_KEY = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{36,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{32,})"
)
# After `user:` up to the last @, also over slashes, which passwords may hold and ports do not; else before the path.
_URL_LOGIN = re.compile(
    r"""://(?:[^/?#\s'":@]*:(?!\d{1,5}(?:[/?#\s'"]|$))[^\s'"]*|[^/?#\s'"]*)@""",
)
_URL_SIGNATURE = re.compile(
    r"([?&][^=&\s]*(?:token|secret|passw|credential|key|sig)[^=&\s]*=)[^&\s'\"]+", re.I
)


def without_secrets(text: str) -> str:
    """The text, without keys that can be told by their form, logins in addresses, and signatures of addresses."""
    text = _URL_LOGIN.sub("://(not shown)@", text)
    return _SECRET_VALUE.sub("(not shown)", _URL_SIGNATURE.sub(r"\1(not shown)", text))


def has_login(address: str) -> bool:
    """Whether an address has a login in it: `https://user:password@host`."""
    return _URL_LOGIN.search(address) is not None


def has_signature(address: str) -> bool:
    """Whether an address has a key or a signature among its parameters: `https://host/file?X-Amz-Signature=…`."""
    return _URL_SIGNATURE.search(address) is not None


def has_key(text: str) -> bool:
    """Whether a whole access key or token stands in the text, told by its form."""
    return _WHOLE_KEY.search(text) is not None
