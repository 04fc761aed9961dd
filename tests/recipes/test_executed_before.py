"""Figures that were executed before: told again while nothing that they hang on has changed, and no longer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.config import load_request
from trimtab.config.schema import Config
from trimtab.hardware.catalogue import accelerators
from trimtab.launches import Launch
from trimtab.placement.plan import MemoryShare, PlacementPlan
from trimtab.placement.profile import ModelProfile, Part, Widths
from trimtab.recipes import executed_before, trial_identity
from trimtab.recipes.planning import Known
from trimtab.recipes.trial_step import Executed, Held, Trial

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
PLAN = PlacementPlan(
    device="cuda:0", precision="bf16", scaler=False, weight_precision="bf16", strategy="single"
)
KNOWN = Known(
    ModelProfile(
        hidden=64,
        intermediate=128,
        attention=192,
        parts=(Part(name="layers.0", parameters=7, trainable=3, is_layer=True),),
        vocabulary=512,
        towers={"vision": Widths(hidden=1, intermediate=2, attention=3)},
        ties=(("a", "b"),),
    ),
    "LlamaForCausalLM",
    ("layers.0.q_proj",),
    4,
)
DONE = Executed(
    memory={"cuda:0": Held(peak=5, reserved=8, context=3, kinds={"weights": 4})},
    rows="1 row of 64 tokens",
    work={"pass": {Launch(12, 7, "half", "compiled"): 2.5, Launch(0, 9, "", "eager"): 3}},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "max_position_embeddings": 128,
    }
    (model / "config.json").write_text(json.dumps({**config, **SHAPE}))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


def words_of(folder: Path, *more: str) -> list[str]:
    given = [f"model={folder / 'model'}", f"data.source={folder / 'rows.jsonl'}", "data.max_length=64"]
    return [*given, "lora.r=4", "training.batch_size=1", "speed.compile=false", "speed.kernels=plain", *more]


def config_of(folder: Path, *more: str) -> Config:
    return load_request(None, words_of(folder, *more)).config


def trial_of(config: Config, gpus: str = "H200", plan: PlacementPlan = PLAN, counts: bool = False) -> Trial:
    return Trial(config=config, plan=plan, gpus=accelerators(gpus), counts=counts)


def looked_at_anew(config: Config) -> tuple[str, str]:
    trial_identity._installed.cache_clear()
    return trial_identity.of_model(config), trial_identity.of_trial(trial_of(config))


def _grown(file: Path) -> None:
    file.write_text(file.read_text() + " ")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda folder, patch: _grown(folder / "model" / "config.json"), id="the model's config"),
        pytest.param(
            lambda folder, patch: (folder / "model" / "tokenizer.json").write_text("{}"), id="a new file"
        ),
        pytest.param(lambda folder, patch: _grown(folder / "rows.jsonl"), id="the data"),
        pytest.param(
            lambda folder, patch: patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"),
            id="a variable",
        ),
        pytest.param(lambda folder, patch: patch.syspath_prepend(_with_package(folder)), id="a package"),
        pytest.param(
            lambda folder, patch: patch.setattr(trial_identity, "OWN", _another_source(folder)), id="source"
        ),
    ],
)
def test_whatever_it_hangs_on_gives_another_identity(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    config = config_of(folder)
    before = looked_at_anew(config)
    assert looked_at_anew(config) == before
    change(folder, monkeypatch)
    after = looked_at_anew(config)
    assert after[0] != before[0]
    assert after[1] != before[1]


def _with_package(folder: Path) -> str:
    (folder / "site" / "peft-99.0.dist-info").mkdir(parents=True)
    return str(folder / "site")


def _another_source(folder: Path) -> Path:
    """Trimtab's own with one line more."""
    made = folder / "source"
    shutil.copytree(trial_identity.OWN, made, ignore=shutil.ignore_patterns("*.pyc"))
    file = made / "virtual" / "allocator.py"
    file.write_text(file.read_text() + "# one line more\n")
    return made


def test_a_copy_of_the_source_is_the_same_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = looked_at_anew(config_of(folder))
    made = folder / "source"
    shutil.copytree(trial_identity.OWN, made)
    monkeypatch.setattr(trial_identity, "OWN", made)
    assert looked_at_anew(config_of(folder)) == before


def test_settings_gpus_plan_and_counts_give_another_identity(folder: Path) -> None:
    plain = config_of(folder)
    trials = [
        trial_of(plain),
        trial_of(config_of(folder, "data.max_length=65")),
        trial_of(config_of(folder, "training.optimizer=sgd")),
        trial_of(plain, "A100-40GB"),
        trial_of(plain, "2xH200"),
        trial_of(plain, plan=replace(PLAN, precision="fp16")),
        trial_of(plain, counts=True),
    ]
    assert len({trial_identity.of_trial(trial) for trial in trials}) == len(trials)


@pytest.mark.parametrize(
    "words",
    [
        ["training.learning_rate=3e-4", "training.lr_scheduler=linear", "training.warmup_steps=7"],
        [
            "training.epochs=9",
            "training.save_steps=5",
            "training.logging_steps=10",
            "training.keep_best=false",
        ],
        ["seed=4", "monitor.progress=plain", "monitor.slow_after_seconds=9", "samples.prompts=[hello]"],
    ],
)
def test_what_no_memory_hangs_on_is_told_again(folder: Path, words: list[str]) -> None:
    plain, other = config_of(folder), config_of(folder, *words)
    assert plain != other
    assert trial_identity.of_trial(trial_of(other)) == trial_identity.of_trial(trial_of(plain))
    assert trial_identity.of_model(other) == trial_identity.of_model(plain)


@pytest.mark.parametrize(
    "word",
    [
        *("training.weight_decay=0.1", "training.gradient_checkpointing=true", "training.batch_size=2"),
        *("training.gradient_accumulation_steps=2", "monitor.stop_on_nonfinite=false", "lora.dropout=0.1"),
        *("training.group_by_length=true", "training.max_grad_norm=0.5", "speed.head=plain"),
    ],
)
def test_what_memory_may_hang_on_is_executed_again(folder: Path, word: str) -> None:
    plain, other = config_of(folder), config_of(folder, word)
    assert trial_identity.of_trial(trial_of(other)) != trial_identity.of_trial(trial_of(plain))


def test_where_it_is_written_and_how_much_is_free_do_not_matter(folder: Path) -> None:
    told = replace(PLAN, memory={"cuda:0": MemoryShare(weights=1)}, reasons={"device": "it is there"})
    other = config_of(folder, f"output_dir={folder / 'run'}")
    assert trial_identity.of_trial(trial_of(other, plan=told)) == trial_identity.of_trial(
        trial_of(config_of(folder))
    )


def test_a_model_of_the_hub_is_known_by_its_snapshot_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    snapshot = folder / "hub" / "models--some--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    config = load_request(None, ["model=some/model", "data.source=/nowhere.jsonl"]).config
    seen = {trial_identity.of_model(config)}
    (snapshot / "config.json").write_text("{}")
    seen.add(trial_identity.of_model(config))
    (snapshot / "config.json").write_text('{"hidden_size": 1}')
    seen.add(trial_identity.of_model(config))
    assert len(seen) == 3


def test_much_is_known_by_size_and_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_identity, "_MOST_READ", 4)
    clips = folder / "clips"
    clips.mkdir()
    (clips / "a.wav").write_bytes(b"12345")
    os.utime(clips / "a.wav", ns=(0, 0))
    config = config_of(folder, f"data.source={clips}")
    before = trial_identity.of_model(config)
    (clips / "a.wav").write_bytes(b"54321")
    os.utime(clips / "a.wav", ns=(0, 0))
    assert trial_identity.of_model(config) == before  # nothing was read
    os.utime(clips / "a.wav", ns=(1, 1))
    assert trial_identity.of_model(config) != before
    monkeypatch.setattr(trial_identity, "_MOST_FILES", 0)
    with pytest.raises(trial_identity.Unknowable, match="too many files"):
        trial_identity.of_model(config)


def test_what_runs_a_models_own_code_has_no_identity(folder: Path) -> None:
    config = config_of(folder, f"model.trust_remote_code=['{folder / 'model'}']")
    with pytest.raises(trial_identity.Unknowable, match="own code"):
        trial_identity.of_trial(trial_of(config))


def test_what_is_kept_comes_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    assert executed_before.known("a" * 64) is None
    executed_before.keep_known("a" * 64, KNOWN)
    executed_before.keep_executed("b" * 64, DONE)
    assert executed_before.known("a" * 64) == KNOWN
    answer = executed_before.executed("b" * 64)
    assert answer is not None
    assert answer.executed == DONE
    assert answer.since


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text[: len(text) // 2], id="cut off"),
        pytest.param(lambda text: text.replace('"peak": 5', '"peak": 6'), id="another figure"),
        pytest.param(lambda text: text.replace(" UTC", " GMT"), id="another time"),
        pytest.param(lambda text: "[]", id="something else"),
        pytest.param(lambda text: "", id="empty"),
    ],
)
def test_a_damaged_answer_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[str], str]
) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    executed_before.keep_executed("b" * 64, DONE)
    file = tmp_path / "executed" / f"{'b' * 64}.json"
    whole = file.read_text()
    file.write_text(damage(whole))
    assert file.read_text() != whole
    assert executed_before.executed("b" * 64) is None
    executed_before.keep_executed("b" * 64, DONE)
    assert executed_before.executed("b" * 64) is not None


def test_the_oldest_answers_go_and_other_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    monkeypatch.setattr(executed_before, "_MOST", 2)
    (tmp_path / "executed").mkdir()
    (tmp_path / "executed" / "mine.json").write_text("mine")
    for place, name in enumerate("abc"):
        executed_before.keep_executed(name * 64, DONE)
        os.utime(tmp_path / "executed" / f"{name * 64}.json", ns=(place, place))
    executed_before.keep_executed("d" * 64, DONE)
    there = {path.name for path in (tmp_path / "executed").iterdir()}
    assert there == {"mine.json", f"{'c' * 64}.json", f"{'d' * 64}.json"}


def test_a_folder_that_cannot_be_written_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "file"))
    executed_before.keep_executed("b" * 64, DONE)
    assert executed_before.executed("b" * 64) is None


@pytest.mark.parametrize("afresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_second_plan_tells_the_first_ones_figure_without_torch(folder: Path, afresh: bool) -> None:
    def planned(*more: str) -> tuple[dict[str, object], list[str]]:
        """What `plan` says, and which of the heavy libraries its own process has imported."""
        program = (
            "import sys\nfrom trimtab.cli import main\n"
            "try:\n    main()\nfinally:\n"
            "    print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules], file=sys.stderr)\n"
        )
        words = ["plan", "--json", "--gpus", "H200", *words_of(folder, f"output_dir={folder / 'run'}"), *more]
        made = subprocess.run(
            [sys.executable, "-c", program, *words],
            env={**os.environ, "TRIMTAB_CACHE": str(folder / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        return json.loads(made.stdout), json.loads(made.stderr.splitlines()[-1].replace("'", '"'))

    first, imported = planned()
    assert not imported  # another process looks at the model, and executes
    assert len(list((folder / "cache" / "executed").iterdir())) == 2
    second, imported = planned()
    assert not imported
    assert second["memory"] == first["memory"]
    said = [plan["reasons"]["memory"] for plan in (first, second)]  # type: ignore[index]
    assert said[0].startswith("executed on virtual GPUs")
    assert said[1].startswith(f"{said[0]}; kept from ")
    if afresh:
        again, _ = planned("--fresh")
        assert again["reasons"] == first["reasons"]
        assert again["memory"] == first["memory"]
