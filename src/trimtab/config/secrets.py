"""Settings that hold a secret are refused: a config is saved, logged and shown. Secrets come by the environment alone.

It tells a secret by its form (a login or a signature in an address, a whole access key in any text) or by its value,
where a variable holds it. What a prompt says of addresses is left alone. Never shows what it found.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.config.facts import leaves, value_of_setting
from trimtab.config.keys import RECIPE_SECTIONS, settings
from trimtab.config.problems import ConfigError, Problem
from trimtab.config.schema import Config
from trimtab.redaction import has_key, has_login, has_signature, secret_variable_in, strong_secrets

_STORE = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, and leave only the address here"
_HUB = "set HF_TOKEN in the environment, and leave only the name here"
ADDRESSES = {
    "model.name": _HUB,
    "model.revision": _HUB,
    "data.source": _STORE,
    "data.eval_source": _STORE,
    "data.endpoint_url": _STORE,
    "output_dir": "name a folder on this machine",
    "training.resume": "name a folder on this machine",
    **{
        f"{name}.{key}": how
        for name, section in RECIPE_SECTIONS.items()
        for key, how in section.addresses.items()
    },
}
"""Settings that may be an address, and how to do without a secret in it."""
_KEYS = "remove it; keys come by the environment alone: HF_TOKEN, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"

_STAYS = "the variable is enough, for it is read from the environment"


def secret_in(
    key: str, value: object, held: Sequence[tuple[str, set[str]]] | None = None
) -> tuple[str, str] | None:
    """Why a setting's value may not be kept, and what to change; None where it holds no secret.

    `held`: the environment's secrets, where many settings are asked for."""
    for text in (leaf for leaf in leaves(value) if isinstance(leaf, str)):
        if key in ADDRESSES and has_login(text):
            return "has a login in the address, and settings are saved and shown", ADDRESSES[key]
        if key in ADDRESSES and has_signature(text):
            return "has a key or a signature in the address, and settings are saved and shown", ADDRESSES[key]
        if has_key(text):
            return "holds an access key, and settings are saved and shown", ADDRESSES.get(key, _KEYS)
        if (variable := secret_variable_in(text, held)) is not None:
            return f"holds the value of {variable}, and settings are saved and shown", "remove it: " + _STAYS
    return None


def refuse_secrets(config: Config) -> None:
    """Raises `ConfigError` where a config that code has made or changed holds a secret."""
    found = []
    held = strong_secrets()
    for key in settings():
        why = secret_in(key, value_of_setting(config, key), held)
        if why is not None:
            found.append(Problem(key, "(not shown)", *why))
    if found:
        raise ConfigError(found)
