"""A TEMPLATE must write what the training template wrote, or the export says that it cannot."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import chat_templates
import pytest
from export_helpers import byte_level_tokenizer, sentencepiece_tokenizer

from trimtab.errors import RequestError
from trimtab.export import gotemplate
from trimtab.export.chat_template import ollama_chat
from trimtab.models.chat import PLAIN_TEMPLATE

TEMPLATES = {**chat_templates.EXACT, "ours for base models": PLAIN_TEMPLATE}
CONVERSATIONS = [
    [("user", "Hi")],
    [("system", "Be kind."), ("user", "Hi")],
    [("user", "Hi"), ("assistant", "Hello."), ("user", "Why?\n\nReally?")],
    [
        ("system", 'Say "{{ x }}".'),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
        ("user", "é"),
    ],
]


def as_messages(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("pairs", CONVERSATIONS)
def test_template_renders_as_training_did(name: str, pairs: list[tuple[str, str]]) -> None:
    tokenizer = sentencepiece_tokenizer(template=TEMPLATES[name])
    chat = ollama_chat(tokenizer)
    messages = as_messages(pairs)
    expected = messages
    if name == "no system" and messages[0]["role"] == "system":
        # The place that data preparation gives to a system text that the template refuses.
        expected = as_messages([("user", f"{pairs[0][1]}\n\n{pairs[1][1]}"), *pairs[2:]])
    wanted = tokenizer.apply_chat_template(expected, tokenize=False, add_generation_prompt=True)
    assert gotemplate.render(chat.template, messages) == wanted.removeprefix("<s>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_that_stands_last_is_left_open(name: str) -> None:
    tokenizer = sentencepiece_tokenizer(template=TEMPLATES[name])
    chat = ollama_chat(tokenizer)
    rendered = gotemplate.render(chat.template, as_messages([("user", "Hi"), ("assistant", "Once upon")]))
    assert rendered.endswith("Once upon")


def test_bos_is_left_to_llama_cpp_only_when_it_adds_it() -> None:
    adds = sentencepiece_tokenizer(template=chat_templates.LLAMA_3)
    assert "<s>" not in ollama_chat(adds).template
    # A byte-level tokenizer that does not add BOS by itself: the template's own is kept.
    plain = byte_level_tokenizer("qwen2")
    plain.chat_template, plain.bos_token = chat_templates.LLAMA_3, "<|endoftext|>"
    rendered = gotemplate.render(ollama_chat(plain).template, as_messages([("user", "Hi")]))
    assert rendered.startswith("<|endoftext|><|start_header_id|>user")


def test_bos_inside_a_conversation_stays() -> None:
    chat = ollama_chat(sentencepiece_tokenizer(template=chat_templates.LLAMA_2))
    rendered = gotemplate.render(
        chat.template, as_messages([("user", "a"), ("assistant", "b"), ("user", "c")])
    )
    assert rendered == "[INST] a [/INST] b </s><s>[INST] c [/INST]"


@pytest.mark.parametrize(
    ("template", "stops"),
    [
        (chat_templates.GENERIC_CHATML, ["<|im_end|>"]),
        (chat_templates.LLAMA_3, ["<|eot_id|>", "<|im_end|>", "<|start_header_id|>user<|end_header_id|>"]),
        (chat_templates.ALPACA, ["<|im_end|>", "### Instruction:"]),
    ],
)
def test_stop_strings(template: str, stops: list[str]) -> None:
    tokenizer = byte_level_tokenizer("qwen2")
    tokenizer.chat_template = template
    assert ollama_chat(tokenizer).stops == stops


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (chat_templates.LLAMA_3, "trims white space"),
        (chat_templates.LLAMA_3_DATED, "today's date"),
        (chat_templates.THINKING, "began with '<think>\\n\\n</think>'"),
        (chat_templates.OPENED_THOUGHT, "training text is not this prompt"),
        (chat_templates.THINKING, "drops <think>"),
        (chat_templates.THINKING, "leaves tool answers out"),
        (chat_templates.TOOLS, "no tool descriptions"),
        (chat_templates.SYSTEM_AT_THE_END, "with a system message prompts differ"),
        (chat_templates.SYSTEM_IN_LAST, "with a system message prompts differ"),
    ],
)
def test_what_cannot_be_carried_over_is_said(template: str, said: str) -> None:
    notes = ollama_chat(sentencepiece_tokenizer(template=template)).notes
    assert any(said in note for note in notes), notes


def test_a_plain_template_needs_no_notes() -> None:
    assert ollama_chat(sentencepiece_tokenizer(template=chat_templates.ZEPHYR)).notes == []


def test_tool_answers_are_carried_over_where_they_are_plain_turns() -> None:
    chat = ollama_chat(sentencepiece_tokenizer(template=chat_templates.GENERIC_CHATML))
    messages = as_messages([("user", "a"), ("assistant", "call"), ("tool", "1"), ("tool", "2")])
    assert "<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n" in gotemplate.render(
        chat.template, messages
    )


def test_a_template_that_cannot_be_expressed_shows_the_conversation() -> None:
    with pytest.raises(RequestError) as caught:
        ollama_chat(sentencepiece_tokenizer(template=chat_templates.NUMBERED))
    text = str(caught.value)
    assert "conversation: user" in text
    assert "#1 user" in text
    assert "--to gguf" in text


def test_a_template_that_rewrites_contents_is_refused() -> None:
    with pytest.raises(RequestError, match="rewrites what is said"):
        ollama_chat(sentencepiece_tokenizer(template=chat_templates.SHOUTING))


def test_a_template_that_refuses_turns_says_why() -> None:
    with pytest.raises(RequestError, match="one question only"):
        ollama_chat(sentencepiece_tokenizer(template="{{ raise_exception('one question only') }}"))


GO = """package main
import ("encoding/json"; "os"; "strings"; "text/template")
type Message struct { Role, Content string }
type Case struct { Template, System string; Messages []*Message }
func main() {
	var cases []Case
	if err := json.NewDecoder(os.Stdin).Decode(&cases); err != nil { panic(err) }
	out := []string{}
	for _, c := range cases {
		var b strings.Builder
		data := map[string]any{"System": c.System, "Messages": c.Messages}
		if err := template.Must(template.New("").Parse(c.Template)).Execute(&b, data); err != nil { panic(err) }
		out = append(out, b.String())
	}
	json.NewEncoder(os.Stdout).Encode(out)
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("go") is None, reason="no Go toolchain to compare the renderer with")
def test_our_renderer_agrees_with_go(tmp_path: Path) -> None:
    templates = [ollama_chat(sentencepiece_tokenizer(template=t)).template for t in TEMPLATES.values()]
    templates.append(
        '{{- range $i, $m := .Messages -}}\n  {{ if eq .Role "user" "x" }} <{{ $i }}> {{- $m.Content }}\n'
        '{{- else }}{{/* a }} comment */}}[{{ .Content }}] {{ end }}\n {{- end }} {{ `"` }} {{ len .Messages }}'
    )
    cases, ours = [], []
    for template in templates:
        for pairs in [*CONVERSATIONS, [("user", "a"), ("user", "b")], [("user", "a"), ("assistant", "b")]]:
            system, collated = gotemplate.collate(as_messages(pairs))
            fields = [{"Role": m["role"], "Content": m["content"]} for m in collated]
            cases.append({"Template": template, "System": system, "Messages": fields})
            ours.append(gotemplate.render(template, as_messages(pairs)))
    (tmp_path / "main.go").write_text(GO)
    done = subprocess.run(
        ["go", "run", str(tmp_path / "main.go")],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == ours
