"""Tiny models, batches and plain reference loops for the zeroth-order tests."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from trimtab.zeroth.noise import Stream, noise
from trimtab.zeroth.objective import Example, ScoreBatch, build_batch, candidate_scores, example_losses
from trimtab.zeroth.sweep import UPDATE

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def tiny(
    kind: str, dtype: torch.dtype = torch.float32, tie: bool = True, seed: int = 0, layers: int = 2
) -> nn.Module:
    """A small model of that architecture, in eval mode."""
    torch.manual_seed(seed)
    t = transformers
    common = {**SIZES, **TOKENS, "tie_word_embeddings": tie, "num_hidden_layers": layers}
    if kind == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 64}
        config = t.GPT2Config(**sizes, **TOKENS, tie_word_embeddings=tie)
        model: nn.Module = t.GPT2LMHeadModel(config)
    elif kind == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**common))
    elif kind == "qwen3":
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**common, head_dim=8))
    elif kind == "qwen3_moe":
        config = t.Qwen3MoeConfig(
            **common, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        )
        model = t.Qwen3MoeForCausalLM(config)
    elif kind == "opt":
        config = t.OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            **TOKENS,
        )
        model = t.OPTForCausalLM(config)
    elif kind == "gpt_neox":
        sizes = {key: value for key, value in common.items() if key != "num_key_value_heads"}
        model = t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**sizes))
    elif kind == "bert":
        sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
        model = t.BertLMHeadModel(t.BertConfig(**sizes, pad_token_id=0, is_decoder=True))
    else:
        raise ValueError(kind)
    return model.to(dtype).eval()


def with_lora(model: Any, targets: Any = "all-linear", **options: Any) -> nn.Module:
    """An adapter whose B is not zero, so that every one of its tensors matters from the first step."""
    peft = __import__("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    dtype = next(model.parameters()).dtype
    for parameter in adapted.parameters():
        parameter.data = parameter.data.to(dtype)
    return adapted  # type: ignore[no-any-return]


def batch(seed: int, examples: int = 3) -> ScoreBatch:
    """Questions of different lengths with two answers of several tokens."""
    g = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=g).tolist()  # type: ignore[no-any-return]

    return build_batch(
        [Example(ids(4 + 2 * i), [ids(2), ids(1 + i % 3)], (seed + i) % 2) for i in range(examples)], 0, 48
    )


def fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def rounding(products: int = 13, longest: int = 48, dtype: torch.dtype = torch.float32) -> float:
    """How far two orders of adding the same numbers in fp32 may lie apart, as a share of the value.

    Bits are promised where the same products of the same shapes are computed; with another number of rows a BLAS may
    add in another order. A sum of n products, in whatever order, is off by at most lambda * sqrt(n) * u of its terms'
    size but with a chance of 2 exp(-lambda^2 / 2), where u is half a unit in the last place (Higham and Mary, 2019);
    so two orders are apart by lambda * sqrt(n) units at most. Products that depend on each other add their errors in
    the same way: sqrt(products) times as much. lambda = 4: once in 1,500 sums it would be more, were each at its
    worst. The tiny models have two layers of six products in a row (query, scores, mixture, output, up, down) and a
    head; their longest sum has 48 terms: 100 units, 1.2e-5 of a loss. The passes of a step lie 3e-4 and more apart.

    A value that is kept in bf16 is rounded again, and lands on one number or, rarely, on its neighbour, however long
    its sum was: units of that type, of which lambda in a row would be the worst.
    """
    if dtype == torch.float32:
        return 4 * math.sqrt(products * longest) * torch.finfo(dtype).eps
    return 4 * torch.finfo(dtype).eps


def close_losses(
    got: Sequence[Sequence[float]], want: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32
) -> bool:
    """Each loss within rounding of the other, and both sides of equal length."""
    return [len(each) for each in got] == [len(each) for each in want] and all(
        abs(one - two) <= rounding(dtype=dtype) * abs(two)
        for ones, twos in zip(got, want, strict=True)
        for one, two in zip(ones, twos, strict=True)
    )


@contextmanager
def as_scratch(weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, these weights ask for no gradient, as a pass's scratch asks for none.

    By that torch decides whether a batch that does not lie in one piece, as the head gets it, is multiplied as one
    matrix or as several: other shapes, and so other bits.
    """
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)


def plain_loss(
    model: nn.Module, batches: Sequence[ScoreBatch], moved: Sequence[nn.Parameter] | None = None
) -> float:
    """The mean loss over the examples, added up in float64. `moved`: the weights that a pass changes, if not all."""
    total, count = 0.0, 0
    with as_scratch(trainable(model) if moved is None else moved), torch.inference_mode():
        for each in batches:
            for loss in example_losses(candidate_scores(model, each), each.label)[0].tolist():
                total, count = total + loss, count + 1
    return fp32(total / count)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def added(weight: Tensor, coefficient: float, z: Tensor) -> Tensor:
    """weight + coefficient * z in fp32, rounded to the weight's type."""
    return (weight.float() + torch.tensor(fp32(coefficient)) * z).to(weight.dtype)


def halves(stream: Stream, count: int) -> list[int]:
    """Sixteen bits for each element: Philox4x32-7 as its authors define it, in numpy's 64-bit integers."""
    word = np.uint64(0xFFFF_FFFF)
    group = np.arange(-(-count // 8), dtype=np.uint64)
    c = [group, *(np.full_like(group, part) for part in (stream.tensor, stream.step, stream.query))]
    k0, k1 = stream.seed & 0xFFFF_FFFF, stream.seed >> 32
    for _ in range(7):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high0, high1 = p0 >> np.uint64(32), p1 >> np.uint64(32)
        c = [high1 ^ c[1] ^ np.uint64(k0), p1 & word, high0 ^ c[3] ^ np.uint64(k1), p0 & word]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFF_FFFF, (k1 + 0xBB67AE85) & 0xFFFF_FFFF
    parts = [part for each in c for part in (each & np.uint64(0xFFFF), each >> np.uint64(16))]
    return [int(half) for half in np.stack(parts, 1).reshape(-1)[:count]]


def by_chance(wide: Tensor, dtype: torch.dtype, stream: Stream) -> Tensor:
    """fp32 rounded to bf16: down to the number nearer zero, or to the next one as often as the value lies near it."""
    if dtype == torch.float32:
        return wide
    assert dtype == torch.bfloat16
    bits = wide.reshape(-1).contiguous().view(torch.int32).to(torch.int64) & 0xFFFF_FFFF
    low, rest = bits >> 16, bits & 0xFFFF
    made = low + (rest + torch.tensor(halves(stream, bits.numel())) > 0xFFFF)
    return (made << 16).to(torch.uint32).view(torch.float32).to(dtype).reshape(wide.shape)


def reference_mezo(
    model: nn.Module,
    batches_of: Callable[[int], Sequence[ScoreBatch]],
    steps: int,
    *,
    rate: float,
    eps: float,
    seed: int,
    weight_decay: float = 0.0,
    seen: Sequence[tuple[float, ...]] | None = None,
) -> list[tuple[float, ...]]:
    """MeZO as in the paper: perturb every weight, measure, perturb the other way, measure, move.

    It moves by the losses in `seen`, where there are any, and gives back those that it measured itself: then losses
    can be compared within rounding, and the weights still to the bit.
    """
    weights, measured = trainable(model), []
    for step in range(steps):
        start = [w.detach().clone() for w in weights]
        z = [noise(Stream(seed, step, i), w.shape) for i, w in enumerate(weights)]
        losses = []
        for sign in (1, -1):
            for w, s, n in zip(weights, start, z, strict=True):
                w.data = added(s, sign * eps, n)
            losses.append(plain_loss(model, batches_of(step)))
        measured.append(tuple(losses))
        plus, minus = losses if seen is None else seen[step]
        move = fp32(rate) * (plus - minus) / (2 * eps)
        for i, (w, s, n) in enumerate(zip(weights, start, z, strict=True)):
            keep = fp32(1 - fp32(rate) * weight_decay) if w.dim() > 1 else 1.0
            wide = s.float() * torch.tensor(keep) - torch.tensor(fp32(move)) * n
            w.data = by_chance(wide, s.dtype, Stream(seed, step, i, UPDATE))
    return measured


def same_weights(one: nn.Module, two: nn.Module) -> bool:
    first, second = one.state_dict(), two.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k].cpu(), second[k].cpu()) for k in first)


def bits(model: nn.Module) -> list[Tensor]:
    """The weights as bytes, so that -0.0 and 0.0 differ."""
    return [p.detach().clone().contiguous().view(-1).view(torch.uint8) for p in model.parameters()]
