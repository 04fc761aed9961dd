"""Renders the part of Go's text/template that our Modelfiles use, to check them without Ollama.

Known: text, trim markers, comments, `if`/`else if`/`else`, `range`, variables, fields, parentheses, and the
functions and, or, not, eq, ne, len, slice, index. Anything else is an error, never a guess.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Possessive: what an action holds can be read in one way only, and an open one is seen at once.
ACTION = re.compile(
    r"\{\{(-\s)?(?P<body>(?:/\*.*?\*/|\"(?:\\.|[^\"\\])*+\"|`[^`]*+`|(?!/\*|(?:\s?-)?\}\})[^\"`])*+)(\s-)?\}\}",
    re.S,
)
TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:\\.|[^"\\])*"|`[^`]*`)|(?P<number>-?\d+)|(?P<assign>:=|=)|(?P<punct>[(),|])
    |(?P<path>\$\w*(?:\.\w+)*|(?:\.\w+)+|\.)|(?P<word>[A-Za-z_]\w*))""",
    re.X,
)
SPACE = " \t\r\n"
CONSTANTS = {"true": True, "false": False, "nil": None}


class GoTemplateError(ValueError):
    """The template is not valid, or uses what this renderer does not know."""


@dataclass(frozen=True)
class Token:
    kind: str
    text: str


@dataclass
class Node:
    """A piece of the template: `text`, `print`, `set`, `if` or `range`."""

    kind: str
    text: str = ""
    names: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    body: list[Node] = field(default_factory=list)
    other: list[Node] = field(default_factory=list)


def render(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt that Ollama makes of a conversation ({role, content} each) with this TEMPLATE."""
    system, collated = collate(messages)
    said = [{"Role": message["role"], "Content": message["content"]} for message in collated]
    return execute(template, {"System": system, "Messages": said})


def collate(messages: Sequence[Mapping[str, str]]) -> tuple[str, list[dict[str, str]]]:
    """What Ollama does first: neighbours of one role become one message; all system texts are gathered."""
    out: list[dict[str, str]] = []
    for message in messages:
        if out and out[-1]["role"] == message["role"] != "tool":
            out[-1]["content"] += "\n\n" + message["content"]
        else:
            out.append({"role": message["role"], "content": message["content"]})
    return "\n\n".join(m["content"] for m in messages if m["role"] == "system"), out


def execute(template: str, data: Any) -> str:
    """Render with `data` as the dot and as `$`."""
    pieces: list[str] = []
    try:
        _run(parse(template), data, {"$": data}, pieces)
    except (TypeError, LookupError, ValueError, RecursionError) as error:
        if isinstance(error, GoTemplateError):
            raise
        # A number without a length, an index outside of a list, an escape that is none, brackets without end.
        raise GoTemplateError(f"a value is not of the kind that its place takes ({error})") from None
    return "".join(pieces)


def literal(text: str) -> str:
    """Template source that renders as exactly this text."""
    # Also a single brace at the end: an action may follow.
    return re.sub(r"\{{2,}|\{\Z", lambda braces: f'{{{{ "{braces[0]}" }}}}', text)


def parse(template: str) -> list[Node]:
    """The template as a tree."""
    root: list[Node] = []
    # Each frame: the list that is being filled, and the open `if`/`range` node (None at the root).
    frames: list[tuple[list[Node], Node | None]] = [(root, None)]
    position, trim_next = 0, False
    while (opening := template.find("{{", position)) >= 0:
        match = ACTION.match(template, opening)
        if match is None:
            raise GoTemplateError(f"unclosed action in {template[opening:][:200]!r}")
        _add_text(frames[-1][0], template[position : match.start()], trim_next, bool(match.group(1)))
        position, trim_next = match.end(), bool(match.group(3))
        body = match.group("body").strip()
        if not body.startswith("/*"):
            _add_action(frames, body)
    _add_text(frames[-1][0], template[position:], trim_next, False)
    if len(frames) > 1:
        raise GoTemplateError("unexpected end of template: an {{ if }} or {{ range }} is not closed")
    return root


def _add_text(into: list[Node], text: str, trim_left: bool, trim_right: bool) -> None:
    text = text.lstrip(SPACE) if trim_left else text
    text = text.rstrip(SPACE) if trim_right else text
    if text:
        into.append(Node("text", text=text))


def _add_action(frames: list[tuple[list[Node], Node | None]], body: str) -> None:
    tokens = _lex(body)
    word = tokens[0].text if tokens and tokens[0].kind == "word" else ""
    into, opened = frames[-1]
    if word in ("if", "range"):
        names, rest = _assignment(tokens[1:])
        node = Node(word, names=names, tokens=rest)
        into.append(node)
        frames.append((node.body, node))
    elif word == "else":
        if opened is None or into is opened.other:
            raise GoTemplateError("{{ else }} without {{ if }}")
        frames[-1] = (opened.other, opened)
        if len(tokens) > 1:
            if tokens[1].text != "if":
                raise GoTemplateError(f"unknown action {body!r}")
            chained = Node("if", tokens=tokens[2:])
            opened.other.append(chained)
            # The one {{ end }} closes the whole chain, so the inner `if` takes the frame's place.
            frames[-1] = (chained.body, chained)
    elif word == "end":
        if opened is None:
            raise GoTemplateError("{{ end }} without {{ if }} or {{ range }}")
        frames.pop()
    else:
        names, rest = _assignment(tokens)
        into.append(Node("set" if names else "print", names=names, tokens=rest))


def _lex(body: str) -> list[Token]:
    tokens, position, end = [], 0, len(body.rstrip())
    while position < end:
        match = TOKEN.match(body, position)
        if match is None or match.lastgroup is None:
            raise GoTemplateError(f"cannot read {body[position:]!r}")
        tokens.append(Token(match.lastgroup, match.group(match.lastgroup)))
        position = match.end()
    return tokens


def _assignment(tokens: list[Token]) -> tuple[list[str], list[Token]]:
    """Split `$i, $x := pipeline` into its names and the pipeline."""
    for i, token in enumerate(tokens):
        if token.kind == "assign":
            if token.text != ":=":
                raise GoTemplateError("assignment to an existing variable is not supported here")
            return [t.text for t in tokens[:i] if t.kind == "path"], tokens[i + 1 :]
    return [], tokens


def _run(nodes: list[Node], dot: Any, variables: dict[str, Any], out: list[str]) -> None:
    scope = dict(variables)
    for node in nodes:
        if node.kind == "text":
            out.append(node.text)
            continue
        value = _evaluate(node.tokens, dot, scope)
        if node.kind == "print":
            out.append(_printed(value))
        elif node.kind == "set":
            scope[node.names[0]] = value
        elif node.kind == "if":
            inner = {**scope, node.names[0]: value} if node.names else scope
            _run(node.body if value else node.other, dot, inner, out)
        else:
            for i, item in enumerate(value):
                bound = dict(zip(node.names, (i, item) if len(node.names) == 2 else (item,), strict=False))
                _run(node.body, item, {**scope, **bound}, out)
            if not value:
                _run(node.other, dot, scope, out)


def _evaluate(tokens: list[Token], dot: Any, scope: dict[str, Any]) -> Any:
    left = deque(tokens)
    value = _command(left, dot, scope)
    if left:
        raise GoTemplateError(f"unexpected {left[0].text!r}")
    return value


def _command(left: deque[Token], dot: Any, scope: dict[str, Any]) -> Any:
    """The value of a call or of a single operand; what it takes up is gone from `left`."""
    if not left:
        raise GoTemplateError("missing value")
    if left[0].kind != "word" or left[0].text in CONSTANTS:
        return _operand(left, dot, scope)
    name, arguments = left.popleft().text, []
    while left and left[0].text != ")":
        arguments.append(_operand(left, dot, scope))
    return _call(name, arguments)


def _operand(left: deque[Token], dot: Any, scope: dict[str, Any]) -> Any:
    token = left.popleft()
    if token.kind == "string":
        return token.text[1:-1] if token.text[0] == "`" else json.loads(token.text)
    if token.kind == "number":
        return int(token.text)
    if token.kind == "path":
        return _field(token.text, dot, scope)
    if token.text == "(":
        value = _command(left, dot, scope)
        if not left or left.popleft().text != ")":
            raise GoTemplateError("missing )")
        return value
    if token.text in CONSTANTS:
        return CONSTANTS[token.text]
    raise GoTemplateError(f"unexpected {token.text!r}")


def _field(path: str, dot: Any, scope: dict[str, Any]) -> Any:
    head, *names = path.split(".")
    if head and head not in scope:
        raise GoTemplateError(f"undefined variable {head}")
    value = scope[head] if head else dot
    for name in filter(None, names):
        if not isinstance(value, Mapping) or name not in value:
            raise GoTemplateError(f"no field {name} in {path}")
        value = value[name]
    return value


def _call(name: str, arguments: list[Any]) -> Any:
    match name, arguments:
        case "and", [*_, last]:
            return next((a for a in arguments if not a), last)
        case "or", [*_, last]:
            return next(filter(None, arguments), last)
        case "not", [value]:
            return not value
        case "eq", [first, second, *more]:
            return first in (second, *more)
        case "ne", [first, second]:
            return first != second
        case "len", [value]:
            return len(value)
        case "slice", [value, start]:
            return value[start:]
        case "index", [value, where]:
            return value[where]
    raise GoTemplateError(f"unknown call {name} with {len(arguments)} arguments")


def _printed(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int)):
        return str(value)
    raise GoTemplateError(f"cannot print a {type(value).__name__}")
