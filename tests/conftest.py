"""What every test stands on: no hub, no progress bars, no left-over launcher variables."""

from __future__ import annotations

import compileall
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpu_tests
import warm_trials

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

ROOT = Path(__file__).resolve().parent.parent
if os.environ.get("TRIMTAB_OTHER_BLAS", "0") != "0":  # as `make test-processors` sets it
    import other_blas

    other_blas.install()

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Our own plugin is an entry point of the installed package; a checkout on PYTHONPATH has none."""
    from trimtab.virtual import pytest_plugin

    if not pluginmanager.is_registered(pytest_plugin):
        pluginmanager.register(pytest_plugin, "trimtab")
    parser.addoption(
        "--tell-failures", action="store_true", help="name a failed test, with its error, at once"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Our sources compiled once, as an installer does: what a rehearsal compiles goes with its overlay, each time."""
    if config.getoption("--tell-failures"):
        config.pluginmanager.register(gpu_tests.TellFailures(config))
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(ROOT / "src", quiet=1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported for the tests lives as long as they do: Python's collector does not walk it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    gpu_tests.prepare(item)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK_VARIABLES, "ACCELERATE_TORCH_DEVICE", "TORCHELASTIC_RUN_ID", "TRIMTAB_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def repository() -> Path:
    return ROOT


@pytest.fixture
def trimtab(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`trimtab WORDS` without a new interpreter, which takes seconds to import; ends as a process would."""

    def run(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        from trimtab.cli import main

        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["trimtab", *words])
            patch.chdir(cwd or Path.cwd())
            for name, value in env.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main()
        code = ended.value.code or 0
        assert isinstance(code, int), code
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def _warm_trials() -> Iterator[warm_trials.Server]:
    server = warm_trials.Server()
    yield server
    server.close()


@pytest.fixture
def warm_trials_server(_warm_trials: warm_trials.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that are made in forks of one process (see warm_trials.py)."""
    from trimtab.recipes import trials

    monkeypatch.setattr(trials, "start_server", _warm_trials.start)


@pytest.fixture
def shared_data() -> Path:
    """Real data kept beside the checkout; the suite passes without it."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder.name} beside the checkout")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real, random, two-layer Llama and a byte-level tokenizer with a ChatML template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system what is the answer to this question"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=512,
        chat_template=(
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
        ),
    )
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short Alpaca rows of different lengths."""
    import json

    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [
        {
            "instruction": f"What is {a} plus {b}?",
            "input": "",
            "output": f"It is {a + b}. " + "So it is. " * (a % 4),
        }
        for a in range(8)
        for b in range(5)
    ]
    path.write_text("\n".join(json.dumps(r) for r in rows), encoding="utf-8")
    return path
