"""Tiny real models, tokenizers and runs for the export tests, and real llama.cpp to compare with."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from trimtab.config import Config, dump_config
from trimtab.export.gguf_vocab import LLAMA3_SPLIT, QWEN2_SPLIT

PROMPTS = [
    "The capital of France is",
    "Expected all tensors to be on the same device, but found",
    "def add(a, b):\n    return",
    "It's 1984 and 365  days later, they'll",
    "Größe: 3,14 € — naïve café",
    "東京は日本の首都です。",
    "   three spaces\n\n\tand a tab",
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB",
    "🙂 emoji, then THE END!!!",
    "a",
    'She said "no", and left',
    "x=1;y = 22;  z=  333",
]
CORPUS = [
    *PROMPTS,
    "the quick brown fox jumps over the lazy dog " * 3,
    "It's what they're saying: we'll see 12345 67 times",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def byte_level_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A small byte-level BPE cut like `qwen2`, `llama-bpe`, `dbrx`, `smollm` or `gpt-2`."""
    tokenizer = Tokenizer(BPE())
    split = {"qwen2": QWEN2_SPLIT, "llama-bpe": LLAMA3_SPLIT, "dbrx": LLAMA3_SPLIT}.get(kind)
    if split:
        cut = pre_tokenizers.Split(Regex(split), behavior="isolated")
        steps = [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if kind == "smollm" else []
        steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(
        vocab_size=480,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=specials,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if kind == "llama-bpe":
        spec = json.loads(tokenizer.to_str())
        spec["model"]["ignore_merges"] = True
        tokenizer = Tokenizer.from_str(json.dumps(spec))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token=None
    )
    fast.chat_template = CHATML
    return fast


def sentencepiece_tokenizer(prepend: str = "always", template: str | None = None) -> PreTrainedTokenizerFast:
    """A small BPE in Llama 2's manner: spaces as ▁, bytes for what is unknown, BOS before the text.

    `prepend` is `always`, `first`, `never`, or `normalizer` for the older layout with a Prepend normalizer.
    """
    tokenizer = Tokenizer.from_str(_sentencepiece(prepend))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    fast.chat_template = template
    return fast


@cache
def _sentencepiece(prepend: str) -> str:
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    trainer_alphabet = [*map(chr, range(33, 127)), "▁"]
    trainer = BpeTrainer(
        vocab_size=520,
        special_tokens=specials,
        initial_alphabet=trainer_alphabet,
        limit_alphabet=len(trainer_alphabet),
        show_progress=False,
    )
    words = [word for line in CORPUS for word in line.split()]
    tokenizer.train_from_iterator(words, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in ("<unk>", "<s>", "</s>")]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


def tiny_model(config: Any, seed: int = 0, scale: float = 0.2) -> Any:
    """A random model whose weights are large enough that its answers are not all alike."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, scale)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.5)
    return model


def write_full_run(folder: Path, model: Any, tokenizer: Any, **settings: Any) -> Path:
    """A finished run of method full."""
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return _finish(folder, Config(method="full", **settings))


def write_lora_run(
    folder: Path, base: Path | str, tokenizer: Any, *, targets: Sequence[str], seed: int = 1, **lora: Any
) -> Path:
    """A finished run of method lora, with random non-zero weights in both matrices."""
    from peft import LoraConfig, get_peft_model

    name = str(base)
    source = name
    if name == "smollm2":
        from trimtab.models import model_source

        source = model_source(Config().model)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    settings: dict[str, Any] = {"r": 8, "lora_alpha": 16, **lora}
    model = get_peft_model(model, LoraConfig(target_modules=list(targets), task_type="CAUSAL_LM", **settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder / "adapter")
    tokenizer.save_pretrained(folder / "adapter")
    return _finish(folder, Config.model_validate({"method": "lora", "model": {"name": name}}))


def _finish(folder: Path, config: Config) -> Path:
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    (folder / "summary.json").write_text("{}", encoding="utf-8")
    return folder


LLAMA_SERVER = """
import os, sys, xllamacpp
file, adapter = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = file
params.n_ctx = 512
params.n_parallel = 1
params.warmup = False
params.verbosity = 0
params.cpuparams.n_threads = 1
# llama.cpp rounds attention to f16 by itself; here only the file is under test.
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
if adapter:
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
os._exit(0)
"""


class LlamaCpp:
    """A GGUF file in real llama.cpp, asked for tokens and first-token log-probabilities.

    It runs in a process of its own: were it to hang or crash, one test would fail and not the whole suite.
    """

    def __init__(self, file: Path, adapter: Path | None = None) -> None:
        command = [sys.executable, "-c", LLAMA_SERVER, str(file), str(adapter or "")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        weakref.finalize(self, _stop, self.process)
        watchdog = threading.Timer(120, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.address = self.process.stdout.readline().strip()
        watchdog.cancel()
        assert self.address, f"llama.cpp did not load {file.name}:\n{self.process.stderr.read()[-2000:]}"
        self.printable = self.tokens("a", add_special=False)[0]

    def _ask(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def tokens(self, text: str, *, add_special: bool = True) -> list[int]:
        answer = self._ask("/tokenize", content=text, add_special=add_special, parse_special=True)
        return list(answer["tokens"])

    def log_probs(self, ids: Sequence[int], count: int) -> dict[int, float]:
        """The `count` most likely next tokens and their log-probabilities."""
        # Probabilities are taken before the bias, which only makes the sampled token one that prints.
        bias = [[self.printable, 1000.0]]
        options = {"n_predict": 1, "n_probs": count, "temperature": 0.0, "cache_prompt": False}
        answer = self._ask("/completion", prompt=list(ids), logit_bias=bias, **options)
        first = answer["completion_probabilities"][0]["top_logprobs"]
        return {item["id"]: item["logprob"] for item in first}


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def reference_log_probs(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0, -1].double().log_softmax(-1)


def largest_gap(model: Any, cpp: LlamaCpp, prompts: Sequence[Sequence[int]], vocab: int) -> float:
    """The largest difference over the five likeliest tokens (by transformers) of each prompt."""
    worst = 0.0
    for ids in prompts:
        reference = reference_log_probs(model, ids)
        found = cpp.log_probs(ids, vocab)
        for token in reference.topk(5).indices.tolist():
            worst = max(worst, abs(found[token] - reference[token].item()))
    return worst
