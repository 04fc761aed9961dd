"""How often the hub is asked where nobody knows its name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from trimtab import hub

pytest.importorskip("huggingface_hub")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The library's waits before it asks again; it asks a hub that is no longer told to be offline."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    waits: list[float] = []
    monkeypatch.setattr(_http.time, "sleep", waits.append)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    _http.close_session()
    known = hub.resolves
    known.cache_clear()
    yield waits
    known.cache_clear()
    _http.close_session()


def _unknown(*_: Any, **__: Any) -> NoReturn:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def _ask() -> None:
    from huggingface_hub.utils import http_backoff

    with pytest.raises(Exception, match="not known"):
        http_backoff("HEAD", "https://hub.invalid/model/resolve/main/config.json")


def test_a_name_that_nobody_knows_is_asked_once(monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", _unknown)
    undo = hub.ask_once()
    try:
        _ask()
        assert slept == []
    finally:
        undo()
    _ask()
    assert len(slept) == 5, "undone, the library asks as it does"


def test_who_is_known_and_does_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    monkeypatch.setattr(hub, "resolves", lambda host: host == "hub.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", _unknown)
    undo = hub.ask_once()
    try:
        _ask()
        assert len(slept) == 5
    finally:
        undo()


def test_a_proxy_resolves_for_itself(monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", _unknown)
    assert not hub.resolves("hub.invalid")
    hub.resolves.cache_clear()
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert hub.resolves("hub.invalid")
