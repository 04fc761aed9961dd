"""Where the hub's name cannot be resolved, it is asked once: its library would ask six times, over 23 seconds.

For what wants an answer in seconds, a plan or a rehearsal; a run asks as the library does. The error is the library's.
"""

from __future__ import annotations

import functools
import importlib
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

ASKING = "huggingface_hub.utils._http"
"""The module that asks again."""


def ask_once() -> Callable[[], None]:
    """From now on in this process; what is returned undoes it."""
    module: Any = importlib.import_module(ASKING)
    real = getattr(module, "_http_backoff_base", None)
    if real is None:
        return lambda: None

    @functools.wraps(real)
    def asked(method: str, url: str, **how: Any) -> Iterator[Any]:
        if not resolves(urlsplit(url).hostname):
            how["max_retries"] = 0
        yield from real(method, url, **how)

    def undo() -> None:
        module._http_backoff_base = real

    module._http_backoff_base = asked
    return undo


@functools.cache
def resolves(host: str | None) -> bool:
    """Whether this machine knows an address by that name, or leaves that to a proxy."""
    if host is None or getproxies():
        return True
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        return False
    return True
