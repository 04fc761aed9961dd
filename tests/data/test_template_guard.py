"""Templates that loop, grow, recurse, reach out or are no templates: each ends with an error that names the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from trimtab.data import template_guard
from trimtab.data.template import ChatTemplate
from trimtab.data.template_guard import check_template
from trimtab.errors import RequestError


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


GROWING = (
    "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 'a' * 100000000000 }}", "GiB of memory"),
        ("ok\n{{ messages[0].content * 1000000000 }}", "line 2, cannot be rendered"),
        ("{{ 'a' | center(100000000000) }}", "GiB of memory"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without end"),
        ("{% for i in range(1000000000000) %}x{% endfor %}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ nobody.knows }}", "undefined, line 1"),
        ("{{ 1 // 0 }}", "by zero, line 1"),
    ],
)
def test_what_a_template_does(tokenizer: Any, template: str, told: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(RequestError, match=told):
        ChatTemplate(tokenizer)


def test_a_template_that_grows_is_stopped_at_the_limit(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_guard, "_HEADROOM", 1 << 28)  # what is taken on the way is written to
    tokenizer.chat_template = GROWING
    with pytest.raises(RequestError, match="GiB of memory"):
        ChatTemplate(tokenizer)


def test_a_template_that_loops_is_interrupted(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_guard, "SECONDS", 0.2)
    loop = "\n{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}"
    good, tokenizer.chat_template = tokenizer.chat_template, loop
    with pytest.raises(RequestError, match="line 2, cannot be rendered"):
        ChatTemplate(tokenizer)
    tokenizer.chat_template = good
    assert "probe" not in ChatTemplate(tokenizer).render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("ok\n{% for x in %}", "no valid Jinja, line 2"),
        ("{% for m in messages %}", "no valid Jinja, line 1"),
        ("{{ 1 | nofilter }}", "No filter named"),
        ("{{ 9 ** 9 ** 9 }}", "raises to a power"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("x" * 2_000_000, "2,000,000 characters"),
    ],
)
def test_what_is_no_template(template: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        check_template(template)


def test_transformers_own_marks_are_known() -> None:
    check_template(
        "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% continue %}{% endfor %}"
    )
