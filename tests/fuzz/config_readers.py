"""The readers of settings, model folders, chat templates, runs and logs that are fuzzed, with valid files for each.

A case is drawn by hypothesis: how a valid file is damaged (`damage.py`), and a tree of values to put into it. Accepted
is a value or a TrimtabError; another error, too much time or memory is a fault.
`python tests/fuzz/config_readers.py READER CASES [SEED]` runs them in this process, under a limit of memory.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import yaml
from checkpoint_reader import checkpoints
from damage import Damage
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError

Case = Callable[[Damage, Any], object]
MEMORY = 6 << 30
SECONDS = 30.0
HERE = Path(__file__).parent
ROOT = HERE.parent.parent

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["yes", "1e400", "0x1F", "010", "2024-01-01", "<<", "*a", "&a", "!!int x", "{", "[", "null"]
    )
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
CASES = st.tuples(st.integers(0, 2**63), TREES)


def put_into(tree: Any, value: Any, damage: Damage) -> Any:
    """The tree with the value in the place of one of its own."""
    if isinstance(tree, dict) and tree and damage.random.random() < 0.8:
        key = damage.random.choice(list(tree))
        return {**tree, key: put_into(tree[key], value, damage)}
    return value


def written(damage: Damage, tree: Any, value: Any) -> bytes:
    """A JSON file of the tree, damaged in one of three ways."""
    kind = damage.random.randrange(3)
    if kind == 0:
        return damage.raw(json.dumps(tree, indent=1).encode())
    return damage.as_json(damage.tree(tree) if kind == 1 else put_into(tree, value, damage))


def config(folder: Path) -> Case:
    from trimtab.config import dump_config, load_config

    texts = [path.read_bytes() for path in sorted(ROOT.glob("examples/*.yaml"))]
    texts += [
        dump_config(
            load_config(None, [f"recipe={name}", "reward=length"] if name == "grpo" else [f"recipe={name}"])
        ).encode()
        for name in ("sft", "grpo", "vision")
    ]
    texts += [
        b"a: &a {epochs: 2}\ntraining:\n  <<: *a\nsamples: {prompts: &p [x, *p]}\n",
        b'{"seed": 1, "lora": {"r": 4}}',
    ]
    trees = [yaml.safe_load(text) for text in texts[:-2]]
    file = folder / "run.yaml"

    def case(damage: Damage, value: Any) -> object:
        kind = damage.random.randrange(4)
        if kind == 0:
            content = damage.raw(damage.random.choice(texts), damage.random.choice(texts))
        elif kind == 1:
            content = damage.as_json(damage.tree(damage.random.choice(trees)))
        else:
            tree = put_into(damage.random.choice(trees), value, damage)
            content = (
                damage.as_json(tree)
                if kind == 2
                else yaml.dump(tree, allow_unicode=True).encode("utf-8", "replace")
            )
        file.write_bytes(content)
        return load_config(file, [])

    return case


def overrides(folder: Path) -> Case:
    from trimtab.cli.arguments import config_from
    from trimtab.config.keys import settings

    names = [
        *settings(),
        "lr",
        "optim",
        "report_to",
        "bf16",
        "model",
        "data",
        "lora",
        "no_such",
        "",
        "a.b.c",
        "<<",
    ]

    def case(damage: Damage, value: Any) -> object:
        random = damage.random
        words = []
        for _ in range(random.choice((1, 2, 3))):
            name, said = (
                random.choice(names),
                random.choice((str(value), json.dumps(value, default=str), "[1, 2]", "{a: b}")),
            )
            text = damage.raw(said.encode("utf-8", "replace")).decode("utf-8", "replace").replace("\0", "")
            words += random.choice(
                ([f"{name}={text}"], [f"--{name}", text], [f"--{name}={text}"], [f"--no-{name}"], [text])
            )
        return config_from(["recipe=sft", *words])

    return case


def small_model(folder: Path) -> Path:
    """A folder with a config and a tokenizer, and no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(["<s>", "</s>", "<unk>", "a", "b"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATES[0]
    fast.save_pretrained(folder)
    LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


def model_config(folder: Path) -> Case:
    from trimtab.config.schema import ModelSettings
    from trimtab.models.load import load_skeleton

    small_model(folder)
    trees = [
        json.loads((folder / "config.json").read_text()),
        {
            "model_type": "qwen3",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "vocab_size": 9,
            "intermediate_size": 16,
            "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        },
        {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 9},
    ]

    def case(damage: Damage, value: Any) -> object:
        (folder / "config.json").write_bytes(written(damage, damage.random.choice(trees), value))
        return load_skeleton(ModelSettings(name=str(folder)))

    return case


def tokenizer(folder: Path) -> Case:
    from trimtab.config.schema import ModelSettings
    from trimtab.models.load import load_tokenizer

    small_model(folder)
    names = ["tokenizer_config.json", "tokenizer.json", "config.json"]
    whole = {name: (folder / name).read_bytes() for name in names}

    def case(damage: Damage, value: Any) -> object:
        name = damage.random.choice(names)
        for other, content in whole.items():
            (folder / other).write_bytes(content)
        (folder / name).write_bytes(written(damage, json.loads(whole[name]), value))
        made = load_tokenizer(ModelSettings(name=str(folder)))
        return made("a b a")["input_ids"]

    return case


TEMPLATES = [
    "{% for m in messages %}{{ '<s>' + m['role'] + ' ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant' }}{% endif %}",
    "{%- set ns = namespace(found=false) -%}{% macro one(m) %}{{ m.role }}: {{ m.content | trim }}</s>{% endmacro %}"
    "{%- for m in messages %}{% if loop.first and m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ one(m) }}{% generation %}{{ '\\n' * 2 }}{% endgeneration %}{% endfor %}",
    "{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}"
    "{% for m in messages[::1] %}{{ '%s: %s' % (m.role, m.content) }}{{ range(3) | list | join('x') }}</s>{% endfor %}",
]


def chat_template(folder: Path) -> Case:
    from transformers import AutoTokenizer

    from trimtab.data import template_guard
    from trimtab.data.template import ChatTemplate

    made = AutoTokenizer.from_pretrained(small_model(folder))
    template_guard.SECONDS = 3.0
    pieces = [
        "{{ m.content * 9 }}",
        "{% for i in range(99) %}",
        "{% endfor %}",
        "{{ ''.__class__ }}",
        "{{ 2 ** 9 }}",
        "{% include 'x' %}",
    ]

    def case(damage: Damage, value: Any) -> object:
        texts = [text.encode() for text in TEMPLATES]
        content = damage.raw(damage.random.choice(texts), damage.random.choice(texts)).decode(
            "utf-8", "replace"
        )
        at = damage.random.randrange(len(content) + 1)
        extra = damage.random.choice([*pieces, "", f"{{{{ {value!r} }}}}"])
        made.chat_template = content[:at] + extra + content[at:]
        return ChatTemplate(made)

    return case


def run_folder(folder: Path) -> Case:
    from trimtab.bench import evaluation
    from trimtab.config import dump_config, load_config
    from trimtab.export.finished import read_run
    from trimtab.recipes.run_folder import RunFolder, check_room
    from trimtab.recipes.run_mark import Mark
    from trimtab.report.make import make_report

    settings = load_config(None, ["recipe=sft"])
    rows = [
        {"step": n, "time": 1.7e9 + n, "phase": "train", "loss": 2.0 / (n + 1), "grad_norm": 1.0}
        for n in range(5)
    ]
    rows.append({"step": 5, "time": 1.7e9 + 9, "phase": "eval", "eval_loss": 1.0})
    trees: dict[str, Any] = {
        "summary.json": {
            "status": "finished",
            "recipe": "sft",
            "steps": 5,
            "planned_steps": 5,
            "ended": 1.7e9,
            "train_seconds": 3.0,
            "eval_loss": {"before": 2.0, "after": 1.0},
            "metrics": {"exact": {"before": 0.1, "after": 0.5}},
            "samples": [{"prompt": "a", "before": "b", "after": "c"}],
            "device": "cpu",
            "precision": "fp32",
        },
        "plan.json": {
            "device": "cpu",
            "precision": "fp32",
            "strategy": "single",
            "reasons": {"device": "no GPU"},
            "processes": 1,
        },
        "data.json": {"train": {"format": "alpaca", "rows": 9, "dropped": {"empty": 1}}, "chat": True},
        ".trimtab-run.json": {
            "format": 1,
            "host": "h",
            "pid": 1,
            "entries": ["adapter", "config.yaml", "data.json", "metrics.jsonl", "plan.json", "summary.json"],
            "began": True,
            "started": 1.0,
            "moving_to": None,
        },
    }
    whole = {name: json.dumps(tree).encode() for name, tree in trees.items()}
    told = dump_config(settings).encode()
    # Reading all settings takes longer than all else: the whole file is there where it is the one that is damaged.
    whole["config.yaml"] = b"recipe: sft\n"
    whole["metrics.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    settings.output_dir = str(folder)
    settings.overwrite = True
    (folder / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "adapter" / name).write_bytes(b"{}")

    changed = set(whole)

    def case(damage: Damage, value: Any) -> object:
        for name in changed:
            (folder / name).write_bytes(whole[name])
        changed.clear()
        name = damage.random.choice(list(whole))
        changed.add(name)
        if name == "metrics.jsonl":
            lines = [damage.as_json(put_into(row, value, damage)) for row in rows]
            content = b"\n".join(lines) if damage.random.random() < 0.5 else damage.raw(whole[name])
        else:
            content = (
                damage.raw(damage.random.choice((told, whole[name])))
                if name == "config.yaml"
                else written(damage, trees[name], value)
            )
        (folder / name).write_bytes(content)
        steps: list[Callable[[], object]] = [
            lambda: make_report(folder),
            lambda: Mark.of(folder),
            lambda: check_room(RunFolder(folder), settings),
            lambda: read_run(folder),
            lambda: evaluation._of_the_run(folder),
        ]
        return all_of(steps)

    return case


def all_of(steps: list[Callable[[], object]]) -> None:
    """Each of them; a refusal of one is told after the others had their turn."""
    refused = None
    for step in steps:
        try:
            step()
        except TrimtabError as error:
            refused = error
    if refused is not None:
        raise refused


def _benchmark(folder: Path) -> Any:
    """The results of a small benchmark."""
    from trimtab.bench.results import Results

    header = {
        "benchmark": "glue+",
        "trimtab": "0",
        "torch": "2",
        "model": "m",
        "model_shown": "m",
        "notes": ["n"],
    }
    header |= {
        "device": "cpu",
        "device_reason": "asked",
        "titles": {"sst2": "SST-2"},
        "data": {"sst2": {"origin": "sample"}},
    }
    results = Results.open(folder, header)
    cell = {"task": "sst2", "method": "mezo", "seed": 0}
    done = {
        "status": "finished",
        "settings": {"steps": 5},
        "score": 0.5,
        "metrics": {"accuracy": 0.5},
        "eval_rows": 16,
    }
    curve = [{"step": n, "forwards": n, "backwards": 0, "score": n / 10} for n in range(1, 6)]
    results.add(cell | done | {"forwards": 5, "backwards": 0, "train_seconds": 1.0, "curve": curve})
    results.add(cell | {"method": "dizo", "status": "failed", "reason": "it broke"})
    return json.loads((folder / "results.json").read_text())


def page_files(folder: Path) -> Case:
    from trimtab.bench.results import _read
    from trimtab.export.gguf_adapter import _settings
    from trimtab.report.make import make_report

    finding = {
        "kind": "device-mismatch",
        "severity": "error",
        "message": "m",
        "cause": "c",
        "fix": "f",
        "where": {"file": "a.py", "line": 3, "code": "x"},
    }
    trees = [
        {
            "verdict": "faults",
            "findings": [finding],
            "memory": {},
            "steps": 2,
            "seconds": 1.0,
            "notes": ["n"],
            "target": "a.py",
        },
        {"verdict": "clean", "findings": [], "memory": {}, "steps": 2, "seconds": 1.0},
        _benchmark(folder / "made"),
    ]
    adapter = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "alpha_pattern": {"q_proj": 2},
        "rank_pattern": {},
        "bias": "none",
    }

    def case(damage: Damage, value: Any) -> object:
        file = folder / "results.json"
        at = damage.random.randrange(len(trees))
        file.write_bytes(written(damage, trees[at], value))
        other = folder / "adapter_config.json"
        other.write_bytes(written(damage, adapter, value))
        return all_of(
            [
                lambda: make_report(file if at < 2 else folder),
                lambda: _read(file),
                lambda: _settings(other),
            ]
        )

    return case


def log(folder: Path) -> Case:
    from trimtab.diagnose.explain import explain, last_error

    texts = [path.read_bytes() for path in sorted((ROOT / "tests" / "diagnose").glob("*.py"))]
    texts.append(
        b'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    x.cuda()\nRuntimeError: CUDA error\n'
    )

    def case(damage: Damage, value: Any) -> object:
        text = damage.random.choice(texts)
        start = damage.random.randrange(len(text))
        cut = damage.raw(text[start : start + 1500]) + str(value).encode("utf-8", "replace")
        told = cut.decode("utf-8", errors="replace")
        return explain(told), last_error(told)

    return case


def environment(folder: Path) -> Case:
    from trimtab.hardware.launcher import detect_launcher

    names = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "SLURM_PROCID",
        "SLURM_STEP_ID",
        "SLURM_NTASKS",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_JOB_ID",
        "SLURM_STEP_NODELIST",
        "SLURM_NNODES",
        "SLURM_NODEID",
        "SLURM_LOCALID",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMI_RANK",
        "PMI_SIZE",
        "KUBERNETES_SERVICE_HOST",
        "PET_NPROC_PER_NODE",
        "TRIMTAB_LAUNCHER",
    ]

    def case(damage: Damage, value: Any) -> object:
        random = damage.random
        usual = [
            "0",
            "1",
            "2",
            "-1",
            "",
            "env",
            "4(x2),3",
            "4(x99999999999)",
            "gpu[003-006]",
            "９",
            "٣",
            "9" * 5000,
            "1.0",
            " 2 ",
        ]
        return detect_launcher(
            {name: random.choice([*usual, str(value)]) for name in random.sample(names, random.randrange(12))}
        )

    return case


READERS: dict[str, Callable[[Path], Case]] = {
    reader.__name__: reader
    for reader in (
        config,
        overrides,
        model_config,
        tokenizer,
        chat_template,
        run_folder,
        checkpoints,
        page_files,
        log,
        environment,
    )
}


def fuzz(reader: str, cases: int, seed: int, watched: bool = False) -> tuple[Counter[str], list[str]]:
    """How the cases ended, and the text of each end that is not accepted."""
    ends: Counter[str] = Counter()
    bad: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{reader}-"))
    case = READERS[reader](folder)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(CASES)
    def one(drawn: tuple[int, Any]) -> None:
        number, value = drawn
        if watched:
            faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
        started = time.monotonic()
        try:
            case(Damage(seed, number), value)
            ends["value"] += 1
        except TrimtabError as error:
            ends[type(error).__name__] += 1
            if len(str(error)) > 20_000:
                bad.append(f"{reader} {number} {str(value)[:200]}: a message of {len(str(error))} characters")
        except Exception as error:
            ends[type(error).__name__] += 1
            lines = "".join(traceback.format_exception(error)[-8:])[-3000:]
            bad.append(f"{reader} seed {seed} number {number} value {str(value)[:300]!a}:\n{lines}")
        if time.monotonic() - started > SECONDS:
            bad.append(f"{reader} seed {seed} number {number}: took {time.monotonic() - started:.0f} s")

    try:
        one()
    finally:
        if watched:
            faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(folder, ignore_errors=True)
    return ends, bad


def main(reader: str, cases: int, seed: int = 14) -> int:
    faulthandler.enable()
    os.environ["HF_HUB_OFFLINE"] = "1"
    fuzz(reader, 5, seed)  # imports, before memory is counted
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    started = time.monotonic()
    ends, bad = fuzz(reader, cases, seed, watched=True)
    kinds = Counter(text.strip().splitlines()[-1][:150] for text in bad)
    told = {
        "reader": reader,
        "seed": seed,
        "cases": sum(ends.values()),
        "ends": ends,
        "bad": len(bad),
        "kinds": kinds,
    }
    print(json.dumps(told | {"seconds": round(time.monotonic() - started)}))
    shown: set[str] = set()
    for text in bad:
        last = text.strip().splitlines()[-1][:60]
        if last not in shown and len(shown) < 8:
            shown.add(last)
            print(text)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
