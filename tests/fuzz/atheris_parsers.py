"""The parsers that are ours, under a fuzzer that is guided by the lines it reaches (atheris, which is not installed).

`python tests/fuzz/atheris_parsers.py NAME -runs=100000` fuzzes one of them; options are libFuzzer's, such as
`-max_total_time=60`. Accepted is a value, or the error that the parser has for what it cannot read; anything else, and
an input that takes seconds, is a fault: the input is kept in a file named after it. Not collected by pytest; opens no
network.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp(prefix="trimtab-atheris-"))
Target = Callable[[bytes], None]


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def overrides() -> Target:
    from trimtab.config.flags import as_words
    from trimtab.config.read import read_overrides

    def target(data: bytes) -> None:
        read_overrides(as_words(text_of(data).split("\n")), [])

    return target


def settings() -> Target:
    from trimtab.config import load_config
    from trimtab.errors import TrimtabError

    path = FOLDER / "settings.yaml"

    def target(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(TrimtabError):
            load_config(path, [])

    return target


def yaml_text() -> Target:
    import yaml

    from trimtab.config.yaml_text import Dumper, plain_tree

    def target(data: bytes) -> None:
        try:
            tree = plain_tree(text_of(data))
        except ValueError:
            return
        again = plain_tree(yaml.dump(tree, Dumper=Dumper, allow_unicode=True))
        # By text: what is not a number equals nothing.
        assert repr(again) == repr(tree), f"{tree!r} was written and read back as {again!r}"

    return target


def redaction() -> Target:
    from trimtab.redaction import has_key, has_login, has_signature, names_a_secret, without_secrets

    def target(data: bytes) -> None:
        text = text_of(data)
        once = without_secrets(text)
        assert without_secrets(once) == once, f"hidden twice: {once!r} and {without_secrets(once)!r}"
        assert not has_login(once), f"a login is left in {once!r}"
        for question in (has_key, has_login, has_signature, names_a_secret):
            question(text)
        # Some ten thousand characters, which only take a moment where the time grows with their number.
        without_secrets(text[:64] * 800)

    return target


def log() -> Target:
    from trimtab.diagnose.explain import explain, last_error, match_message

    def target(data: bytes) -> None:
        text = text_of(data)
        for found in explain(text):
            assert 1 <= found.line_number <= text.count("\n") + len(text) + 1
        last_error(text)
        match_message(text)

    return target


def trajectory() -> Target:
    from trimtab.errors import TrimtabError
    from trimtab.zeroth.trajectory import read_trajectory

    path = FOLDER / "trajectory.bin"

    def target(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(TrimtabError):
            read_trajectory(path)

    return target


def json_text() -> Target:
    from trimtab.errors import TrimtabError
    from trimtab.reading import DEEPEST, deeper_than, read_json, read_json_object

    path = FOLDER / "a.json"

    def target(data: bytes) -> None:
        path.write_bytes(data)
        for read in (read_json, read_json_object):
            with contextlib.suppress(TrimtabError):
                assert not deeper_than(read(path, "it", "take another"), DEEPEST)

    return target


def gotemplate() -> Target:
    from trimtab.export.gotemplate import GoTemplateError, literal, render

    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

    def target(data: bytes) -> None:
        text = text_of(data)
        with contextlib.suppress(GoTemplateError):
            render(text, said)
        assert render(literal(text) + "{{ .System }}", said) == text + "s"

    return target


def modelfile() -> Target:
    from trimtab.errors import TrimtabError
    from trimtab.export.chat_template import OllamaChat
    from trimtab.export.ollama import check_name, model_name
    from trimtab.export.ollama import modelfile as written

    def target(data: bytes) -> None:
        text = text_of(data)
        check_name(model_name(text))
        with contextlib.suppress(TrimtabError):
            chat = OllamaChat(template="{{ .Prompt }}", stops=[text])
            made = written("m.gguf", chat, num_ctx=1, system=text, license_name=text)
            # Read as Ollama does: what stands between the marks is the text, and nothing else is in the file.
            assert f'SYSTEM """{text}"""\n' in made, f"the system text is not in {made!r}"

    return target


def manifest() -> Target:
    from trimtab.manifest import MANIFEST, Damaged, only_listed, read_manifest

    folder = FOLDER / "sealed"
    folder.mkdir()

    def target(data: bytes) -> None:
        (folder / MANIFEST).write_bytes(data)
        only_listed(folder)
        with contextlib.suppress(Damaged):
            for name in read_manifest(folder).files:
                assert (folder / name).resolve().is_relative_to(folder.resolve()), f"{name!r} leads outside"

    return target


def wire() -> Target:
    """What a hostile completion sends to the judge: three answers, or questions before them."""
    from trimtab.rewards.sandbox_child.judge import Judge
    from trimtab.rewards.sandbox_child.wire import Gone

    def target(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data[:4096])
            theirs.shutdown(socket.SHUT_WR)
            judge = Judge(ours)
            given = [1, 2]
            try:
                for _ in range(3):
                    with contextlib.suppress(Told):
                        judge.ask("__call__", given, len, iter("ab"))
            except Gone:
                return
            finally:
                with contextlib.suppress(OSError):
                    judge.stream.close()

    class Told(Exception):
        """An error that the completion raised, by its own word: a test sees it as an error."""

    def told(
        self: Judge, message: object, made: Callable[[Judge, object], BaseException] = Judge.error
    ) -> Told:
        assert isinstance(made(self, message), BaseException)
        return Told()

    Judge.error = told  # type: ignore[assignment, method-assign]
    Judge.heard = lambda self, message: None  # type: ignore[method-assign]
    return target


def cache_note() -> Target:
    from trimtab.data.s3_copy import is_whole

    copy = FOLDER / "rows.jsonl"
    copy.write_bytes(b"{}\n")

    def target(data: bytes) -> None:
        (FOLDER / ".rows.jsonl.whole.json").write_bytes(data)
        assert (
            is_whole(copy, 3) is not True
            or b"ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356" in data
        )

    return target


TARGETS: dict[str, Callable[[], Target]] = {
    made.__name__: made
    for made in (
        *(overrides, settings, yaml_text, redaction, log, trajectory, json_text, gotemplate, modelfile),
        *(manifest, wire, cache_note),
    )
}


SEEDS: dict[str, tuple[str, ...]] = {
    "overrides": ("--learning-rate\n1e-4\n--no-compile", "lora={r: 8}\ntraining.steps=[1, 'a']"),
    "settings": ("model: smollm2\ntraining: {steps: 1, learning_rate: 1e-4}\nlora: &a\n  r: 8\n<<: *a\n",),
    "yaml_text": ("a: &x [1, 2.5, ~, yes, 'b']\nc: {<<: {d: *x}, e: !!int 0x1F}\n? f\n: |\n  g\n",),
    "redaction": (
        "https://me:pw@host:80/?a=b&X-Amz-Signature=abc&token=d#e",
        "{'Authorization': 'Bearer abcdefgh', \"x-my-auth\": \"aaaaaa\"} hf_aaaaaaaaaaaaaaaa sk-A1aaaaaaaaaaaaaa",
    ),
    "log": (
        'Traceback:\n  File "a.py", line 3, in f\n    x()\nRuntimeError: Expected all tensors to be on the same '
        "device, but found at least two devices, cuda:0 and cpu!",
        "[rank0]: \x1b[31mCUDA out of memory. Tried to allocate 2.00 GiB",
    ),
    "trajectory": (
        '{"format": "trimtab-trajectory", "version": 1, "settings": {"method": "dizo", "schedule": "linear"}, '
        '"tensors": 1, "fingerprint": "a", "start": 1, "projected": ["w"], "about": {}}\n' + "abcd" * 40,
    ),
    "json_text": ('{"a": [1, 2.5e3, null, NaN], "b": {"a": "\\u00e9"}, "a": true}', "[" * 150),
    "gotemplate": (
        '{{- range $i, $m := .Messages }}{{ if eq .Role "user" }}{{ .Content }}{{ else if not (len $.System) -}}'
        " x {{- end }}{{ end }}{{/* c */}}{{ slice .Messages 1 | index 0 }}",
    ),
    "manifest": ('{"format": 1, "files": {"a/b": {"size": 1, "sha256": "00"}}, "beside": {}, "step": 3}',),
    "wire": (
        '{"value": ["dict", [["a", ["set", [1, ["int", "0xff"]]]], ["b", ["named", "N", ["x"], [1.5]]]]]}\n',
        '{"ask": "__next__", "args": [["yours", 1]], "kwargs": {}}\n{"changed": {"0": ["list", [1]]}, "same": "0"}\n',
        '{"value": ["mine", 3, "K", true]}\n{"error": [["ValueError"], null, ["a"], {}, ""]}\n'
        '{"value": ["numpy", "int64", [2], ["list", [1, 2]]]}\n{"value": ["fraction", "1/3"]}\n',
        '{"value": ["exception", 4, "E", [["builtin", "KeyError"]]]}\n{"value": ["module", "math"]}\n'
        '{"value": ["known", "json", "JSONDecodeError"]}\n{"value": ["timedelta", [1, 2, 3]]}\n',
    ),
    "cache_note": ('{"size": 3, "sha256": "00", "etag": "a"}',),
}
"""Texts to begin with: a fuzzer that sees lines of Python does not find the words of a format soon."""


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python {sys.argv[0]} NAME [options of libFuzzer]\nnames: {', '.join(TARGETS)}")
    try:
        import atheris
    except ImportError:
        sys.exit(
            "atheris is not installed: `pip install atheris` into an environment of its own, beside trimtab"
        )
    with atheris.instrument_imports(include=["trimtab", "yaml", "json"]):
        target = TARGETS[sys.argv[1]]()
    seeds = FOLDER / "seeds"
    seeds.mkdir()
    for number, text in enumerate(SEEDS.get(sys.argv[1], ())):
        (seeds / str(number)).write_text(text, encoding="utf-8")
    atheris.Setup([sys.argv[0], "-timeout=10", "-rss_limit_mb=4096", *sys.argv[2:], str(seeds)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
