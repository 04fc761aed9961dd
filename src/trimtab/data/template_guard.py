"""A chat template is a program, and comes with the model: it is rendered with a bound on time, memory and length.

Jinja's sandbox keeps it from files, modules and attributes; it does not keep it from looping for ever or from writing
gigabytes. Here both end with an error that names the template's line. The bound on memory needs Linux; elsewhere the
length of what is written and the time are bounded. Never changes a template, nor what it writes.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trimtab.errors import RequestError, TrimtabError

SECONDS = 20.0
"""For one conversation; real templates take milliseconds."""
_MOST_TEXT = 64 << 20
_HEADROOM = 2 << 30
_PAGE = 4096
_MOST_TEMPLATE = 1 << 20
_CHANGE = "set model.chat_template to a template that you know, such as a .jinja file of your own"
_POWER = "it raises to a power (**), which no chat template needs and which can take for ever"


class TemplateFault(RequestError):
    """The template itself cannot be used, whatever the conversation."""


class TemplateRefusal(TemplateError):
    """The template does not take this conversation."""


class _Late(BaseException):
    """Raised inside the template by the clock. No `except Exception` on the way may take it."""


def check_template(template: str, where: str = "the model's chat template") -> None:
    """Refuse a template that is no Jinja, too long, or could hold the machine up in a single step."""
    if len(template) > _MOST_TEMPLATE:
        raise TemplateFault.of(
            f"{where} has {len(template):,} characters",
            f"no template needs more than {_MOST_TEMPLATE:,}",
            _CHANGE,
        )
    # As transformers writes and reads them: `{% generation %}` is its own mark.
    plain = re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{%\1 if true \2%}{% endif %}", template)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    try:
        tree = environment.parse(plain)
        power = next(iter(tree.find_all(nodes.Pow)), None)
        if power is None:
            with guarded(where):  # compiling computes what is constant
                environment.compile(tree)
    except TemplateSyntaxError as error:
        raise TemplateFault.of(
            f"{where} is no valid Jinja, line {error.lineno}: {_line_of(template, error.lineno)}",
            " ".join(str(error.message).split())[:300],
            _CHANGE,
        ) from None
    except (RecursionError, OverflowError, SyntaxError, ValueError, TypeError, AssertionError) as error:
        said = str(error)[:200] or "no reason given"
        raise TemplateFault.of(
            f"{where} cannot be compiled", f"{type(error).__name__}: {said}", _CHANGE
        ) from None
    if power is not None:
        line = _line_of(template, power.lineno)
        raise TemplateFault.of(f"{where}, line {power.lineno}: {line}", _POWER, _CHANGE)


@contextmanager
def guarded(where: str = "the model's chat template") -> Iterator[None]:
    """Renders inside it end within the bounds, or by `TemplateFault`. Other errors of the template go on up."""
    try:
        with _bounded_memory(), _bounded_time():
            yield
    except (MemoryError, RecursionError, _Late) as error:
        if isinstance(error, MemoryError):
            why = f"it needs more than {_HEADROOM >> 30} GiB of memory for one conversation"
        elif isinstance(error, RecursionError):
            why = "it calls itself without end"
        else:
            why = f"it takes longer than {SECONDS:g} seconds for one conversation"
        line = template_line(error)
        raise TemplateFault.of(
            f"{where}{f', line {line},' if line else ''} cannot be rendered", why, _CHANGE
        ) from None


def rendered(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """`apply_chat_template` to text, within bounds. What the template raises is a `TemplateRefusal` with its line."""
    template = options.get("chat_template") or tokenizer.chat_template
    if isinstance(template, str):
        _check_once(template)
    try:
        with guarded():
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except TrimtabError:
        raise
    except Exception as error:
        line = template_line(error)
        if line is None and not isinstance(error, TemplateError | TypeError):
            raise
        said = " ".join(str(error).split())[:120] or type(error).__name__
        own_words = type(error) is TemplateError  # as `raise_exception` says them
        raise TemplateRefusal(said if own_words or not line else f"{said}, line {line} of it") from None
    if not isinstance(text, str):
        raise TemplateRefusal(f"it gave a {type(text).__name__} and no text")
    return check_length(text)


def must_render(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """The same where the conversation is one that a template has to take."""
    try:
        return rendered(tokenizer, messages, **options)
    except TemplateRefusal as error:
        roles = ", ".join(str(message.get("role")) for message in messages[:5])
        raise RequestError.of(
            f"the model's chat template refuses a conversation ({roles})", str(error), _CHANGE
        ) from None


@lru_cache(maxsize=16)
def _check_once(template: str) -> None:
    check_template(template)


def check_length(text: str, where: str = "the model's chat template") -> str:
    """The text that a template wrote, refused where it is longer than any conversation."""
    if len(text) > _MOST_TEXT:
        raise TemplateFault.of(
            f"{where} writes {len(text):,} characters for one conversation",
            "no tokenizer takes as much",
            _CHANGE,
        )
    return text


def template_line(error: BaseException) -> int | None:
    """The line of the template at which an error was raised, by Jinja's own table."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == "<template>":
            # Jinja puts the template's lines in the place of its own, but not for the clock's interruption.
            compiled = frame.f_globals.get("__jinja_template__")
            found = line if compiled is None else compiled.get_corresponding_lineno(line)
    return found


def _line_of(template: str, number: int) -> str:
    lines = template.splitlines()
    return lines[number - 1].strip()[:120] if 0 < number <= len(lines) else ""


class _Clock:
    """Interrupts a thread that renders for too long; what C does in one step is not interrupted.

    One thread watches over all, once a second, and ends when nothing is rendered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}
        self._watcher: threading.Thread | None = None
        self._pid = 0

    def start(self, seconds: float) -> None:
        with self._lock:
            if self._pid != os.getpid():  # a fork has the dictionary, and no watcher
                self._ends, self._watcher, self._pid = {}, None, os.getpid()
            self._ends[threading.get_ident()] = time.monotonic() + seconds
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="chat template clock", daemon=True)
                self._watcher.start()

    def stop(self) -> None:
        with self._lock:
            late = self._ends.pop(threading.get_ident(), None) is None
        while late:  # it rang while the last step ended: the interruption comes here, and nowhere later
            time.sleep(0)

    def _watch(self) -> None:
        while True:
            time.sleep(1)
            with self._lock:
                now = time.monotonic()
                for thread in [thread for thread, end in self._ends.items() if end < now]:
                    del self._ends[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(_Late)
                    )
                if not self._ends:
                    self._watcher = None
                    return


_CLOCK = _Clock()


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Lets this process grow by so much and no more, where the system can hold it to that."""
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as file:
        now = int(file.read().split()[0]) * (os.sysconf("SC_PAGE_SIZE") or _PAGE)
    limit = now + _HEADROOM
    if soft != resource.RLIM_INFINITY and soft <= limit:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _bounded_time() -> Iterator[None]:
    _CLOCK.start(SECONDS)
    rang = False
    try:
        yield
    except _Late:
        rang = True
        raise
    finally:
        if not rang:
            _CLOCK.stop()
