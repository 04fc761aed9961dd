"""Explaining pasted text: each known wording, the noise around it, and what is not known."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from examples import EXAMPLES

from trimtab.diagnose.explain import explain, last_error
from trimtab.diagnose.finding import KINDS
from trimtab.diagnose.patterns import PATTERNS

SEEDS = Path(__file__).resolve().parents[3] / "shared" / "seeds"

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 88, in <module>
    main()
  File "/home/me/train.py", line 41, in main
    out = model(input_ids)
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 2546, in embedding
    return torch.embedding(weight, input, padding_idx, scale_grad_by_freq, sparse)
RuntimeError: Expected all tensors to be on the same device, but got index is on cpu, different from other tensors on \
cuda:0 (when checking argument in method wrapper_CUDA__index_select)
"""


def names(text: str) -> list[str]:
    return [explanation.pattern for explanation in explain(text)]


def test_every_pattern_has_an_example_and_a_known_kind() -> None:
    assert {pattern.name for pattern in PATTERNS} == set(EXAMPLES)
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)
    assert {pattern.kind for pattern in PATTERNS} <= set(KINDS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_explained_by_its_own_pattern_first(name: str) -> None:
    first = explain(EXAMPLES[name])[0]
    assert first.pattern == name
    assert first.cause
    assert first.fix
    assert "{" not in first.cause
    assert "?" not in first.cause


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_found_however_it_is_wrapped(name: str, width: int) -> None:
    text = EXAMPLES[name]
    assert names("\n".join(textwrap.wrap(text, width)))[0] == name
    cut = "\n".join(
        line[start : start + width] for line in text.splitlines() for start in range(0, len(line), width)
    )
    assert names(cut)[0] == name


def test_the_users_frame_is_where() -> None:
    (explanation,) = explain(TRACEBACK)
    assert explanation.where is not None
    assert (explanation.where.file, explanation.where.line) == ("/home/me/train.py", 41)
    assert explanation.where.code == "out = model(input_ids)"
    assert "cpu and cuda:0" in explanation.cause


@pytest.mark.parametrize(
    "prefix", ["[rank1]: ", "[1,0]<stderr>:", "\x1b[31m", "(worker pid=812, ip=10.0.0.2) ", "rank 3 | "]
)
def test_prefixes_and_colours_do_not_hide_the_text(prefix: str) -> None:
    (explanation,) = explain("\n".join(prefix + line for line in TRACEBACK.splitlines()))
    assert explanation.pattern == "embedding-index"
    assert explanation.where is not None
    assert explanation.where.line == 41


def test_chinese_prose_with_full_width_punctuation() -> None:
    text = (
        "2025-06-01 12:00:00 - ERROR - 训练失败：RuntimeError：Expected all tensors to be on the same"
        " device，but found"
        " at least two devices，cuda:1 and cuda:0！错误发生在第986行\n数据集报错：KeyError：‘instruction’"
    )
    assert names(text) == ["two-gpus", "key-of-column"]
    assert names("可训练参数：0") == ["no-trainable-parameters"]
    assert names("模型加载到 mps\n设备：cpu\n[卡住]") == ["conflicting-devices"]


def test_notebook_and_rich_tracebacks() -> None:
    notebook = (
        "RuntimeError                              Traceback (most recent call last)\n"
        "Cell In[3], line 5\n      4 x = torch.randn(3, 8)\n----> 5 model(x)\n\n"
        "File /usr/lib/python3/dist-packages/torch/nn/modules/module.py:1553, in Module._call_impl(self)\n"
        "   1552 else:\n-> 1553     return forward_call(*args, **kwargs)\n\n"
        "RuntimeError: Attempting to unscale FP16 gradients.\n"
    )
    (explanation,) = explain(notebook)
    assert explanation.where is not None
    assert (explanation.where.line, explanation.where.code) == (5, "model(x)")
    rich = (
        "╭──── Traceback (most recent call last) ────╮\n│ /home/me/train.py:12 in main              │\n"
        "│                                           │\n│ ❱ 12     scaler.step(opt)                 │\n"
        "╰───────────────────────────────────────────╯\nAssertionError: No inf checks were recorded for"
        " this optimizer.\n"
    )
    (explanation,) = explain(rich)
    assert explanation.where is not None
    assert (explanation.where.line, explanation.where.code) == (12, "scaler.step(opt)")


def test_a_consequence_comes_last() -> None:
    text = EXAMPLES["nccl-timeout"] + "\n" + EXAMPLES["child-failed"] + "\n[rank1]: KeyError: 'question'\n"
    assert names(text) == ["key-of-column", "nccl-timeout", "child-failed"]


def test_one_cause_once_but_each_missing_key() -> None:
    twice = EXAMPLES["two-gpus"]
    text = f"{twice}\n{twice}\nKeyError: 'question'\nKeyError: 'answer'\nKeyError: 'answer'"
    assert names(text) == ["two-gpus", "key-of-column", "key-of-column"]


def test_a_log_with_two_devices_and_no_error() -> None:
    text = (
        "2025-10-24 16:57:28,420 - INFO - Model loaded on mps\n"
        "2025-10-24 16:57:28,545 - INFO - LoRA configured:\n"
        "2025-10-24 16:57:48,900 - INFO -    - Device: cpu\n[STUCK - NO TRAINING PROGRESS]\n"
    )
    (explanation,) = explain(text)
    assert explanation.kind == "placement-conflict"
    assert "mps" in explanation.cause
    assert "cpu" in explanation.cause
    assert explain(text.replace("mps", "cpu")) == []
    assert explain(text.replace("mps", "cuda:0").replace("Device: cpu", "Device: cuda")) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "all is well, loss 2.31 after 100 steps",
        'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n   '
        " f()\nZeroDivisionError: division by zero",
        "{'loss': 0.0213, 'grad_norm': 0.83}",
        "trainable params: 1,126,400 || all params: 1,101,174,784 || trainable%: 0.1023",
        "Saving model to /runs/cuda out",
        "KeyError: 'shape_predictor_68'",
    ],
)
def test_what_is_not_known_is_not_explained(text: str) -> None:
    assert explain(text) == []


def test_last_error_of_an_unknown_text() -> None:
    text = TRACEBACK.split("RuntimeError")[0] + "mylib.FunnyError: the moon is full\n"
    line, where = last_error(text) or ("", None)
    assert line == "mylib.FunnyError: the moon is full"
    assert where is not None
    assert where.line == 41


@pytest.mark.skipif(
    not SEEDS.is_dir(), reason="the documents that name these errors are not beside the repository"
)
@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        ("000", {"embedding-index", "to-of-list", "key-of-column"}),
        ("001", {"conflicting-devices"}),
        ("002", {"cpu-and-gpu", "no-inf-checks"}),
        (
            "003",
            {"key-of-column", "worker-uses-gpu", "views", "model-output-field", "ddp-ready-twice-checkpoint"},
        ),
        ("004", {"two-gpus", "strategy-conflict"}),
    ],
)
def test_the_documents(seed: str, expected: set[str]) -> None:
    (path,) = SEEDS.glob(f"{seed}_*.txt")
    assert set(names(path.read_text(encoding="utf-8", errors="replace"))) == expected


def test_a_long_log() -> None:
    step = "2025-10-24 16:57:{:02d},420 - INFO - {{'loss': {}, 'grad_norm': 0.5}}"
    log = [step.format(n % 60, 2.0 + n / 1e4) for n in range(5000)]
    log[3210] = step.format(7, "nan")
    log[4321] = EXAMPLES["oom-cuda"]
    assert [(e.pattern, e.line_number) for e in explain("\n".join(log))] == [
        ("loss-nan", 3211),
        ("oom-cuda", 4322),
    ]


def test_explaining_imports_no_torch() -> None:
    program = "import sys, trimtab.diagnose.explain; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
