"""Turns a model's Jinja chat template into an Ollama TEMPLATE, and proves on conversations that they agree.

The Jinja template is probed with marked messages: what it writes before, between and after them is all that is
learnt of it. A template that cannot be expressed is an error that shows the conversation that differs.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trimtab.data.template import PROBE_TOOL
from trimtab.data.template_guard import TemplateRefusal, rendered
from trimtab.errors import RequestError
from trimtab.export import gotemplate
from trimtab.export.gguf_vocab import adds_bos

Message = dict[str, str]
SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
OPENINGS = ([USER], [SYSTEM, USER])


@dataclass(frozen=True, kw_only=True)
class OllamaChat:
    """What a Modelfile says about conversations."""

    template: str
    stops: list[str]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """What the Jinja template writes around contents, without a BOS that llama.cpp adds by itself."""

    before: dict[str, str]
    """First role -> text before the first content."""
    between: dict[tuple[str, str], str]
    """Two neighbouring roles -> text between their contents."""
    after: dict[str, str]
    """Last role -> text after the last content."""
    prompt: dict[str, str]
    """Last role -> text after the last content when an answer is asked for."""


def ollama_chat(tokenizer: Any) -> OllamaChat:
    """Derive TEMPLATE and stop strings from the tokenizer's chat template, checked against it."""
    jinja = _Jinja(tokenizer)
    gaps = _probe(jinja)
    candidates = []
    for tool in (True, False):
        with suppress(_Woven):
            candidates.append(_by_role(gaps, tool=tool))
    candidates.append(_by_gap(gaps))
    difference = system_note = ""
    for openings in (OPENINGS, OPENINGS[:1]):
        for template in candidates:
            differs = _difference(jinja, template, gaps, openings)
            if not differs:
                notes = [system_note, *_notes(jinja, template, gaps)]
                return OllamaChat(
                    template=template, stops=_stops(tokenizer, gaps), notes=[note for note in notes if note]
                )
            difference = differs
        system_note = f"with a system message prompts differ from training:\n{difference}"
    raise RequestError.of(
        "the model's chat template cannot be written as an Ollama TEMPLATE",
        f"prompts would differ from those of training:\n{difference}",
        "use --to gguf (the file carries the Jinja template for llama.cpp), or set a simpler model.chat_template",
    )


def plain_text(tokenizer: Any) -> OllamaChat:
    """For a model that was trained to go on with a text: no turns, and a system text on a line before it."""
    return OllamaChat(
        template="{{ if .System }}{{ .System }}\n{{ end }}{{ .Prompt }}",
        stops=[tokenizer.eos_token] if tokenizer.eos_token else [],
        notes=[
            "the model was trained on plain text, so the Modelfile's TEMPLATE is bare: it goes on with the prompt"
        ],
    )


class _Jinja:
    """The training template, as a function of messages; the BOS that llama.cpp adds is taken off."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bos = tokenizer.bos_token if adds_bos(tokenizer) else ""
        self.takes_system = True
        probe = conversation(SYSTEM, USER)
        self.takes_system = self.refusal(probe) is None and probe[0]["content"] in self(probe, ask=False)

    def __call__(self, messages: Sequence[Message], *, ask: bool) -> str:
        if not self.takes_system and messages[0]["role"] == SYSTEM:
            # As training data is prepared: a system text that has no place goes before the first user text.
            first = {"role": USER, "content": messages[0]["content"] + "\n\n" + messages[1]["content"]}
            messages = [first, *messages[2:]]
        text = rendered(self.tokenizer, messages, add_generation_prompt=ask)
        return text.removeprefix(self.bos)

    def knows_tools(self) -> bool:
        """Whether the template writes descriptions of tools that it is given."""
        try:
            text = rendered(self.tokenizer, conversation(USER), tools=[PROBE_TOOL])
        except TemplateRefusal:
            return True  # it does something with them, if only refuse them
        return "probe_tool" in text

    def refusal(self, messages: Sequence[Message]) -> str | None:
        """Why the template does not take such a conversation (templates refuse roles by raising); None if it does."""
        try:
            self(messages, ask=False)
        except TemplateRefusal as error:
            return str(error) or type(error).__name__
        return None


def conversation(*roles: str, mark: str = "") -> list[Message]:
    """A conversation of these roles with contents that occur nowhere else."""
    return [{"role": role, "content": f"{mark}{role}{i}{mark}"} for i, role in enumerate(roles)]


def _probe(jinja: _Jinja) -> Gaps:
    mark = f"⟦{os.urandom(4).hex()}⟧"
    found = Gaps(before={}, between={}, after={}, prompt={})
    if refusal := jinja.refusal(conversation(USER, ASSISTANT, USER)):
        raise RequestError.of(
            "the model's chat template refuses a plain user-assistant-user conversation",
            refusal,
            "set model.chat_template to one that takes user and assistant turns",
        )
    for opening in OPENINGS:
        for turns in ([ASSISTANT, USER], [ASSISTANT], []):
            _record(jinja, found, [*opening, *turns], mark)
    roles = [USER, ASSISTANT, TOOL, ASSISTANT]
    if jinja.refusal(conversation(*roles)) is None:
        _record(jinja, found, roles[:-1], mark)
        _record(jinja, found, roles, mark)
    if not ({USER, ASSISTANT} <= found.after.keys() and USER in found.prompt):
        raise RequestError.of(
            "the model's chat template leaves out or rewrites what is said",
            "nothing can be learnt from it",
            "use --to gguf: the file carries the Jinja template for llama.cpp",
        )
    # A system text that comes after what it should precede: no TEMPLATE will fit, and the check will show it.
    found.before.setdefault(SYSTEM, found.before[USER])
    found.between.setdefault((SYSTEM, USER), "\n\n")
    return found


def _record(jinja: _Jinja, found: Gaps, roles: Sequence[str], mark: str) -> None:
    """Render one marked conversation and note its gaps; an earlier observation is kept."""
    messages = conversation(*roles, mark=mark)
    for ask, tail in ((False, found.after), (True, found.prompt)):
        rest, gaps = jinja(messages, ask=ask), []
        for message in messages:
            gap, marked, rest = rest.partition(message["content"])
            if not marked:
                return  # content left out or rewritten, as tool answers are in some templates
            gaps.append(gap)
        if not ask:
            found.before.setdefault(roles[0], gaps[0])
            for pair, gap in zip(pairwise(roles), gaps[1:], strict=True):
                found.between.setdefault(pair, gap)
        tail.setdefault(roles[-1], rest)


def _by_role(gaps: Gaps, *, tool: bool) -> str:
    """A TEMPLATE in which each role has its own text before and after; _Woven when the gaps do not factor so."""
    answer_end, user_end = gaps.after[ASSISTANT], gaps.after[USER]
    user_start = _minus_prefix(gaps.between[ASSISTANT, USER], answer_end)
    answer_start = _minus_prefix(gaps.between[USER, ASSISTANT], user_end)
    ask = _minus_prefix(gaps.prompt[USER], user_end)
    default = _minus_suffix(gaps.before[USER], user_start)
    system_end = _minus_suffix(gaps.between[SYSTEM, USER], user_start)
    branches = [(SYSTEM, gaps.before[SYSTEM], system_end), (USER, user_start, user_end)]
    if tool:
        tool_start = _minus_prefix(gaps.between.get((ASSISTANT, TOOL), ""), answer_end)
        if not tool_start or gaps.prompt.get(TOOL) != gaps.after[TOOL] + ask:
            raise _Woven
        branches.append((TOOL, tool_start, gaps.after[TOOL]))

    text = gotemplate.literal
    parts = ["{{ range $i, $_ := .Messages }}", "{{ $last := eq (len (slice $.Messages $i)) 1 }}"]
    if default:
        parts.append('{{ if and (eq $i 0) (ne .Role "system") }}' + text(default) + "{{ end }}")
    for i, (role, start, end) in enumerate(branches):
        parts.append(f'{{{{ {"else " if i else ""}if eq .Role "{role}" }}}}')
        parts.append(text(start) + "{{ .Content }}" + text(end))
    # An answer that stands last is being continued: it has no end yet.
    parts.append('{{ else if eq .Role "assistant" }}' + text(answer_start) + "{{ .Content }}")
    parts.append("{{ if not $last }}" + text(answer_end) + "{{ end }}{{ end }}")
    parts.append('{{ if and $last (ne .Role "assistant") }}' + text(ask) + "{{ end }}{{ end }}")
    return "".join(parts)


def _by_gap(gaps: Gaps) -> str:
    """A TEMPLATE for templates that weave turns together (a system text inside the first user turn).

    It holds for conversations that alternate, as such templates demand.
    """
    text = gotemplate.literal
    start = text(gaps.before[USER])
    if gaps.before[SYSTEM] != gaps.before[USER]:
        start = '{{ if eq .Role "system" }}' + text(gaps.before[SYSTEM]) + "{{ else }}" + start + "{{ end }}"
    after_user = text(gaps.between[USER, ASSISTANT])
    if gaps.prompt[USER] != gaps.between[USER, ASSISTANT]:
        after_user = "{{ if $last }}" + text(gaps.prompt[USER]) + "{{ else }}" + after_user + "{{ end }}"
    parts = [
        "{{ range $i, $_ := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}",
        "{{ if eq $i 0 }}" + start + "{{ end }}{{ .Content }}",
        '{{ if eq .Role "user" }}' + after_user,
        '{{ else if eq .Role "system" }}' + text(gaps.between[SYSTEM, USER]),
        "{{ else if not $last }}" + text(gaps.between[ASSISTANT, USER]) + "{{ end }}{{ end }}",
    ]
    return "".join(parts)


def _difference(jinja: _Jinja, template: str, gaps: Gaps, openings: Sequence[list[str]]) -> str:
    """Compare both templates on conversations; the first difference as text, empty when there is none."""
    turns = [[*opening, *[ASSISTANT, USER] * count] for opening in openings for count in range(4)]
    if f'"{TOOL}"' in template:
        turns += [[USER, ASSISTANT, TOOL, *more] for more in ([], [TOOL], [ASSISTANT, USER])]
    for roles in turns:
        for messages in (conversation(*roles), _awkward(roles)):
            wanted, got = jinja(messages, ask=True), gotemplate.render(template, messages)
            if wanted != got:
                return _show(roles, wanted, got)
            answered = [*messages, {"role": ASSISTANT, "content": "An answer."}]
            # An answer being continued: as training wrote it, or as it stands after the prompt, but without its end.
            trained, continued = jinja(answered, ask=False), gotemplate.render(template, answered)
            if continued not in (trained.removesuffix(gaps.after[ASSISTANT]), wanted + "An answer."):
                return _show([*roles, ASSISTANT], trained, continued + gaps.after[ASSISTANT])
    return ""


def _awkward(roles: Sequence[str]) -> list[Message]:
    """Contents that trip template engines: braces, quotes, newlines inside, other scripts."""
    contents = [
        '{{ .Role }} {% raw %} "quoted" \\n',
        "two\n\nlines\tand a tab",
        "Größe: 3 € — 東京 🙂",
        "<b>&amp;</b>",
    ]
    return [{"role": role, "content": contents[i % len(contents)]} for i, role in enumerate(roles)]


def _show(roles: Sequence[str], wanted: str, got: str) -> str:
    lines = difflib.ndiff([repr(wanted)], [repr(got)])
    return f"    conversation: {', '.join(roles)}\n" + "\n".join(f"    {line.rstrip()}" for line in lines)


def _stops(tokenizer: Any, gaps: Gaps) -> list[str]:
    """Strings that end an answer: the end of an answer in training, EOS, and for plain-text templates the next turn."""
    end = gaps.after[ASSISTANT].strip()
    specials = [str(token) for token in tokenizer.get_added_vocab()]
    ending = max((s for s in specials if end.startswith(s)), key=len, default="")
    stops = [ending or end, tokenizer.eos_token or ""]
    start = gaps.between[ASSISTANT, USER].removeprefix(gaps.after[ASSISTANT]).strip()
    if start and not any(special in start for special in specials):
        stops.append(start.splitlines()[0])
    return [stop for stop in dict.fromkeys(stops) if stop]


def _notes(jinja: _Jinja, template: str, gaps: Gaps) -> Iterator[str]:
    """What the training template does beyond turns, and a TEMPLATE cannot."""
    asked = conversation(USER)
    answered = [*asked, {"role": ASSISTANT, "content": "An answer."}]
    prompt, trained = jinja(asked, ask=True), jinja(answered, ask=False)
    opening = trained.removeprefix(prompt).partition("An answer.")[0].strip()
    if not trained.startswith(prompt):
        yield f"training text is not this prompt and the answer: the template asks with {prompt[-40:]!r}"
    elif opening:
        yield f"in training every answer began with {opening!r}: the model writes it itself"
    for does, contents in (
        ("trims white space around messages", ["  spaced  "]),
        ("drops <think>…</think> from earlier answers", ["a", "<think>\nb\n</think>\n\nc", "d"]),
    ):
        said = [{"role": (USER, ASSISTANT)[i % 2], "content": text} for i, text in enumerate(contents)]
        if jinja(said, ask=True) != gotemplate.render(template, said):
            yield f"the training template {does}; Ollama passes it on"
    if "strftime_now" in (jinja.tokenizer.chat_template or ""):
        yield "the training template writes today's date; TEMPLATE keeps the date of this export"
    if TOOL in gaps.after and f'"{TOOL}"' not in template:
        yield "TEMPLATE leaves tool answers out: the training template writes several at once in a way of its own"
    if jinja.knows_tools():
        yield "TEMPLATE passes no tool descriptions and no tool calls on, as the training template does"


class _Woven(Exception):
    """A gap is not the end of one turn and the start of the next."""


def _minus_prefix(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise _Woven
    return text.removeprefix(prefix)


def _minus_suffix(text: str, suffix: str) -> str:
    if not text.endswith(suffix):
        raise _Woven
    return text.removesuffix(suffix)
