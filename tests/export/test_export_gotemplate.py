"""The small renderer of Go templates: what it knows, and that it refuses the rest."""

from __future__ import annotations

import pytest

from trimtab.export.gotemplate import GoTemplateError, collate, execute, literal, render

DATA = {
    "System": "s",
    "Messages": [{"Role": "user", "Content": "a"}, {"Role": "assistant", "Content": ""}],
    "N": 0,
}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", "plain"),
        ("x {{- .System -}} y", "xsy"),
        ("x {{ .System }} y", "x s y"),
        ("a{{/* gone }} */}}b", "ab"),
        ("{{ if .N }}yes{{ else }}no{{ end }}", "no"),
        ("{{ if .N }}1{{ else if .System }}2{{ else }}3{{ end }}", "2"),
        ('{{ if and .System (eq .N 0) (ne .System "t") }}y{{ end }}', "y"),
        ("{{ if or .N (not .N) }}y{{ end }}", "y"),
        ("{{ range .Messages }}[{{ .Role }}:{{ $.System }}]{{ end }}", "[user:s][assistant:s]"),
        ("{{ range $i, $m := .Messages }}{{ $i }}{{ $m.Role }} {{ end }}", "0user 1assistant "),
        (
            "{{ range $i, $_ := .Messages }}{{ $l := eq (len (slice $.Messages $i)) 1 }}{{ $l }} {{ end }}",
            "false true ",
        ),
        ('{{ eq .System "x" "s" }}', "true"),
        ('{{ "{{" }}{{ `a"b` }}{{ "\\n" }}', '{{a"b\n'),
        ("{{ if eq (len .Messages) 2 }}two{{ end }}", "two"),
    ],
)
def test_renders(template: str, expected: str) -> None:
    assert execute(template, DATA) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ if .System }}open",
        "{{ end }}",
        "{{ else }}",
        "{{ .Missing }}",
        "{{ $x }}",
        "{{ printf .System }}",
        "{{ .System | len }}",
        "{{ range .Messages }}{{ break }}{{ end }}",
        "{{ unclosed",
        "{{ if .N }}a{{ else }}b{{ else }}c{{ end }}",
        "{{ .Messages }}",
    ],
)
def test_refuses_what_it_does_not_know(template: str) -> None:
    with pytest.raises(GoTemplateError):
        execute(template, DATA)


def test_literal_text_comes_out_as_it_went_in() -> None:
    text = 'a {{ .System }} {{- "q" }}\n {{{ }}'
    assert execute(literal(text), DATA) == text


def test_collate_joins_neighbours_of_one_role() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "system", "content": "t"},
    ]
    system, collated = collate(messages)
    assert system == "s\n\nt"
    assert [m["content"] for m in collated] == ["s", "a\n\nb", "1", "2", "t"]
    assert render("{{ range .Messages }}{{ .Content }}|{{ end }}", messages) == "s|a\n\nb|1|2|t|"


@pytest.mark.parametrize("text", ["{", "{{", "{{{", "a {{{{ b {", "}}", "{\n"])
def test_braces_before_an_action_stay_text(text: str) -> None:
    assert execute(literal(text) + "{{ .A }}", {"A": "x"}) == text + "x"


@pytest.mark.parametrize(
    "template",
    [
        "{{ len 5 }}",
        '{{ "\\x" }}',
        "{{ index .A 9 }}",
        "{{ range 5 }}{{ end }}",
        "{{ " + "(" * 5000 + " }}",
        # What could be read in many ways took time without end.
        "{{" + "/**/" * 5000,
        "{{" * 50_000,
        "{{ " + "/*" * 50_000,
    ],
)
def test_what_cannot_be_rendered_is_an_error_of_the_template(template: str) -> None:
    with pytest.raises(GoTemplateError):
        execute(template, {"A": [1]})
