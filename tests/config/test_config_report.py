"""What a wrong request prints: every mistake, with its place, its reason and its way out, and no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.config import ConfigError, load_config
from trimtab.config.problems import Problem
from trimtab.errors import RequestError


def problems(*overrides: str, path: Path | None = None) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def only(*overrides: str) -> Problem:
    found = problems(*overrides)
    assert len(found) == 1, [problem.key for problem in found]
    return found[0]


FIVE = """\
model: smollm2
data:
  packing: true
training:
  batchsize: 4
  learning_rate: fast
  epochs: -1
  group_by_length: true
precision: bf61
"""


def test_five_mistakes_make_five_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(FIVE)
    with pytest.raises(ConfigError) as caught:
        load_config(Path("run.yaml"), [])
    assert caught.value.exit_code == 2
    assert (
        str(caught.value)
        == """\
5 problems in run.yaml
  1. training.batchsize = 4   (run.yaml:5)
     is not a setting
     change: did you mean training.batch_size?
  2. training.learning_rate = "fast"   (run.yaml:6)
     must be a number, not text
     change: write a number above 0; the default is 0.0002
  3. training.epochs = -1   (run.yaml:7)
     must be above 0
     change: write a number above 0; the default is 3.0
  4. training.group_by_length = true   (run.yaml:8; data.packing at run.yaml:3)
     cannot go with data.packing: packed sequences are all of one length
     change: remove training.group_by_length, or set data.packing: false
  5. precision = "bf61"   (run.yaml:9)
     must be one of auto, fp32, bf16, fp16
     change: did you mean bf16?"""
    )


def test_file_and_command_line_in_one_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("data: {packing: true}\nlora: {r: 0}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Path("run.yaml"), ["training.group_by_length=true", "lora.alpha=x"])
    assert str(caught.value).startswith("3 problems in run.yaml and on the command line\n")
    keys = [(problem.key, str(problem.origin)) for problem in caught.value.problems]
    assert keys == [
        ("lora.r", "run.yaml:2"),
        ("training.group_by_length", "command line"),
        ("lora.alpha", "command line"),
    ]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("batchsize", "training.batch_size"),
        ("learningRate", "training.learning_rate"),
        ("training.learning-rate", "training.learning_rate"),
        ("lora.learning_rate", "training.learning_rate"),
        ("trainning.lr", "training.learning_rate"),
        ("train.batch_size", "training.batch_size"),
        ("lora.rnk", "lora.r"),
        ("lora.dropuot", "lora.dropout"),
        ("targets", "lora.targets"),
        ("modle", "model"),
        ("epoch", "training.epochs"),
        ("warmup", "training.warmup_steps"),
        ("outputdir", "output_dir"),
        ("data.column", "data.columns"),
        ("max_new_token", "samples.max_new_tokens"),
    ],
)
def test_did_you_mean(name: str, meant: str) -> None:
    problem = only(f"{name}=4")
    assert (problem.key, problem.change) == (name, f"did you mean {meant}?")


def test_an_unknown_section_is_one_mistake() -> None:
    problem = only("trainin={lr: 1, epochs: 2}")
    assert problem.change == "did you mean training?"


@pytest.mark.parametrize(
    ("word", "change"),
    [
        ("devices={sharding: true}", "write sharding instead"),
        (
            "loop={lr: 1, max_steps: 2, r: 4}",
            "write training.learning_rate, training.max_steps, lora.r instead",
        ),
        ("trainer={speed: 1}", "remove it; `trimtab config-schema` lists every setting"),
    ],
)
def test_an_unknown_section_is_told_by_what_it_holds(word: str, change: str) -> None:
    assert only(word).change == change


def test_a_name_like_nothing_points_to_the_list() -> None:
    assert "config-schema" in only("qwertyuiop=1").change


@pytest.mark.parametrize(
    ("word", "reason", "change"),
    [
        ("training.batch_size=2.5", "must be a whole number", "write a whole number of at least 1"),
        ("training.batch_size=true", "must be a number, not true or false", "whole number of at least 1"),
        ("training.learning_rate=.inf", "must be a finite number", "a number above 0"),
        ("training.learning_rate=.nan", "must be a finite number", "a number above 0"),
        ("training.max_steps=0", "must be at least 1", "a whole number of at least 1 or null"),
        ("training.warmup_ratio=1.5", "must be at most 1", "of at least 0 and of at most 1"),
        ("data.eval_fraction=1", "must be below 1", "of at least 0 and below 1; the default is 0.1"),
        ("data.packing=maybe", "must be true or false, not text", "write true or false"),
        ("device=gpu", "must be auto, cpu, mps, cuda or cuda:N", "did you mean cuda?"),
        ("device=cuda1", "must be auto, cpu, mps, cuda or cuda:N", "did you mean cuda?"),
        ("device=tpu", "must be auto, cpu, mps, cuda or cuda:N", "write auto, cpu, mps, cuda or cuda:N"),
        ("precision=float16", "must be one of auto, fp32, bf16, fp16", "did you mean fp16?"),
        ("precision=8", "must be one of auto", "write one of auto, fp32, bf16, fp16; the default is"),
        ("model.name=null", "must be text, not null", 'the default is "smollm2"'),
        ("model.name=[a]", "must be text, not a list", "write text"),
        ("lora.targets=null", "must be text or a list such as [a, b], not null", 'default is "all-linear"'),
        ("samples.prompts=[1]", "must be a list of texts", "write a list"),
        ("data.columns=question", "must be a mapping such as {a: b}, not text", "write a mapping"),
        ("data.columns={a: 1}", "data.columns maps texts to texts", "in quotes"),
        ("data.columns={a: [1]}", "data.columns maps texts to texts", "in quotes"),
        ("grpo.reward={answer: high}", "grpo.reward maps names to numbers", "{a: 1.0"),
        ("training.resume={a: b}", "must be true or false or text, not a mapping", "write true or false"),
        ("seed=4294967296", "must be below 4294967296", "below 4294967296"),
        ("training=5", "must be a section", "write e.g. training.epochs"),
        ("data=[a.json]", "must be text (short for data.source) or a section", "data.source"),
        ("data=", "must be text (short for data.source) or a section", "data.source"),
    ],
)
def test_wrong_values(word: str, reason: str, change: str) -> None:
    problem = only(word)
    assert problem.key == word.partition("=")[0]
    assert reason in problem.reason
    assert change in problem.change


def test_a_number_for_text_in_a_file_asks_for_quotes(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {revision: 1234567}\n")
    (problem,) = problems(path=path)
    assert (problem.key, problem.reason) == ("model.revision", "must be text or null, not a number")
    assert "in quotes" in problem.change


def test_a_wrong_value_does_not_hide_or_invent_conflicts() -> None:
    keys = [
        problem.key
        for problem in problems("device=gpu", "precision=fp16", "training.resume=true", "overwrite=1")
    ]
    assert sorted(keys) == ["device", "overwrite", "training.resume"]


def test_the_alias_that_was_written_is_named() -> None:
    assert only("lr=-1").note == "written as lr"
    problem = only("validation_split_percentage=-5")
    assert (problem.key, problem.value) == ("data.eval_fraction", "-0.05")
    assert problem.note == "from validation_split_percentage = -5"


@pytest.mark.parametrize("text", ["samples: {prompts: &a [*a]}", "data:\n  columns: &a {text: *a}"])
def test_a_value_that_holds_itself(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    (problem,) = problems(path=path)
    assert problem.reason == "has an alias inside what it stands for: it has no end"


@pytest.mark.parametrize("word", ["epochs", "v_proj]", "=3"])
def test_words_that_are_not_overrides(word: str) -> None:
    problem = only(word)
    assert problem.reason == "is not of the form key=value or --key value"
    assert word in problem.key


def test_an_open_bracket_on_the_command_line() -> None:
    problem = only("lora.targets=[q_proj,")
    assert problem.key == "lora.targets"
    assert "bracket" in problem.reason


def test_duplicate_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\ntraining:\n  epochs: 1\n  epochs: 2\ndata: {columns: {a: b, a: c}}\nseed: 1\n")
    found = [(problem.key, problem.origin.line) for problem in problems(path=path) if problem.origin]
    assert found == [("training.epochs", 4), ("a", 5), ("seed", 6)]


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("model: a\ntraining:\n\tepochs: 1\n", 3, "tab"),
        ("model: a\nlora: {r: 4\nseed: 1\n", 3, "is not valid YAML"),
        ("model: a\n  seed: 1\n", 2, "is not valid YAML"),
        ("seed: 1\n---\nseed: 2\n", 2, "more than one YAML document"),
        ("- a\n- b\n", 1, "holds a list, not settings"),
        ("just words\n", 1, "holds plain text, not settings"),
        ("seed: 1\nmodel: a\1b\n", 2, "is not valid YAML"),
        ("model: a\nseed: !!int abc\n", 2, "cannot be read"),
        ("model: !!python/name:os.system\n", 1, "cannot be read"),
        ("? [a]\n: 1\n", 1, "must be plain text"),
    ],
)
def test_files_that_are_not_settings(tmp_path: Path, text: str, line: int, part: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    (problem,) = problems(path=path)
    assert problem.origin is not None
    assert (problem.origin.place, problem.origin.line) == (str(path), line)
    assert part in problem.reason


def test_a_broken_file_and_a_broken_word_are_both_told(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: [\n")
    assert len(problems("oops", path=path)) == 2


def test_a_missing_file_names_those_that_look_like_it(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RequestError, match=r"sft2\.yaml was not found(.|\n)*did you mean .*sft\.yaml\?"):
        load_config(tmp_path / "sft2.yaml", [])
    with pytest.raises(RequestError, match=r"the folder .*nowhere does not exist"):
        load_config(tmp_path / "nowhere" / "sft.yaml", [])


def test_a_folder_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is a folder"):
        load_config(tmp_path, [])
    (tmp_path / "model.bin").write_bytes(b"\xff\xfd\x01")
    with pytest.raises(RequestError, match="is not UTF-8"):
        load_config(tmp_path / "model.bin", [])


SECRET = "Xy7secretvalue99"


@pytest.mark.parametrize(
    "text",
    [
        f"hub_token: {SECRET}\n",
        f"aws_secret_access_key: {SECRET}\n",
        f"store: {{password: {SECRET}}}\n",
        f"training: {{api_key: {SECRET}}}\n",
        f"accounts: [{{password: {SECRET}}}]\n",
        f"hub_token: !{SECRET}\n",
        f"hub_token: *{SECRET}\n",
        f"password: [{SECRET}\n",
        f"data: {{source: rows.json, endpoint_url: ['https://me:{SECRET}@host']}}\n",
        f"model: [hf_{SECRET}]\n",
    ],
)
def test_no_secret_is_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"hf_token=[{SECRET}", f"token:{SECRET}"])
    assert SECRET not in str(caught.value) + repr(caught.value.problems)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_setting_with_tokens_in_its_name_is_shown() -> None:
    assert only("samples.max_new_tokens=0").value == "0"


def test_long_values_are_cut() -> None:
    problem = only("lora.r=" + "x" * 500)
    assert problem.value is not None
    assert len(problem.value) == 60
