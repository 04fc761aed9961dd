"""A model as GGUF: architectures, tensor names, metadata. Written from the format's own rules, without scripts.

It never touches the tokenizer (`gguf_vocab.py`) and never loads a model: it is given tensors to name and write.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import torch

from trimtab.errors import RequestError
from trimtab.export.gguf_vocab import Vocab
from trimtab.export.tensors import Entry, check_format, new_writer, write_gguf

# model_type -> (GGUF architecture, whether the rows of q and k are interleaved pairwise as llama.cpp's
# original rotary embedding wants them). Qwen keeps Hugging Face's half-split order.
FAMILIES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}

TOP_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the writer needs to know of an architecture."""

    arch: str
    interleaved: bool
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool


def shape_of(config: Any) -> Shape:
    """Read the architecture from a transformers config, or raise RequestError when it cannot be written."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise RequestError.of(
            f"model_type {config.model_type!r}: GGUF export does not know this architecture",
            "a wrong guess at tensor order gives a file that loads and answers nonsense",
            f"use --to merged; GGUF works for {', '.join(sorted(FAMILIES))} (dense)",
        )
    if config.hidden_act != "silu":
        raise _cannot(f"hidden_act {config.hidden_act!r}: llama.cpp's {family[0]} computes silu")
    heads = config.num_attention_heads
    return Shape(
        arch=family[0],
        interleaved=family[1],
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        tied=bool(config.tie_word_embeddings),
    )


def _cannot(found: str, why: str = "the exported model would compute something else") -> RequestError:
    return RequestError.of(found, why, "use --to merged")


def gguf_name(hf_name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    if match := LAYER_NAME.fullmatch(hf_name):
        layer, part, kind = match.groups()
        if part in LAYER_TENSORS:
            return f"blk.{layer}.{LAYER_TENSORS[part]}.{kind}"
    else:
        part, _, kind = hf_name.rpartition(".")
        if part in TOP_TENSORS:
            return f"{TOP_TENSORS[part]}.{kind}"
    raise RequestError.of(
        f"tensor {hf_name}: GGUF export has no name for it",
        "leaving it out would change what the model computes",
        "use --to merged, or --to gguf for a plain Llama, Mistral, Qwen2 or Qwen3 model",
    )


def interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from Hugging Face's halves (x1…, y1…) to llama.cpp's pairs (x1, y1, x2, y2, …)."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def heads_to_interleave(name: str, shape: Shape) -> int:
    """How many heads' rows must be interleaved in this GGUF tensor; 0 for none. k has its own, smaller count."""
    if not shape.interleaved:
        return 0
    part = name.split(".")[2] if name.startswith("blk.") else ""
    return {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(part, 0)


def named_entries(entries: Sequence[Entry], shape: Shape) -> list[Entry]:
    """The model's tensors under their GGUF names and in GGUF's row order; a tied head is left out."""
    out = []
    for entry in entries:
        # inv_freq is a buffer that old checkpoints carry; llama.cpp computes it.
        tied = shape.tied and entry.name == "lm_head.weight"
        if not tied and not entry.name.endswith("rotary_emb.inv_freq"):
            name = gguf_name(entry.name)
            out.append(written_as(entry, name, heads_to_interleave(name, shape)))
    return out


def written_as(entry: Entry, name: str, heads: int, factor: float = 1.0) -> Entry:
    """The entry under its GGUF name, with the rows of so many heads interleaved, and multiplied by a factor."""

    def load() -> torch.Tensor:
        tensor = entry.load()
        tensor = tensor if factor == 1.0 else tensor.float() * factor
        return interleave(tensor, heads) if heads else tensor

    return replace(entry, name=name, load=load)


def write_model(
    target: Path,
    config: Any,
    entries: Sequence[Entry],
    vocab: Vocab,
    *,
    dtype: str,
    name: str,
    base_model: str = "",
    license_name: str | None = None,
    progress: bool = False,
) -> list[str]:
    """Write a whole model file. Returns notes for the user."""
    check_format(dtype)
    shape = shape_of(config)
    writer = new_writer(shape.arch, gguf.GGUFType.MODEL, dtype, name, base_model, license_name)
    tensors = named_entries(entries, shape)
    rows = next(entry.shape[0] for entry in tensors if entry.name == "token_embd.weight")
    writer.add_vocab_size(rows)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(shape.head_dim)
    tensors += _add_rope(writer, config, shape)
    vocab.add_to(writer, rows)

    notes = _window_notes(config)
    fell_back = write_gguf(target, writer, tensors, dtype, progress=progress)
    if fell_back:
        told = f"{len(fell_back)} tensors are f16, not q8_0"
        notes.append(f"{told}: their rows are no multiple of 32 ({fell_back[0]}, …)")
    return notes


def _add_rope(writer: gguf.GGUFWriter, config: Any, shape: Shape) -> list[Entry]:
    """Rotary embedding: base frequency, scaling as metadata, or Llama 3's factors as a tensor."""
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "yarn", "llama3") or (kind == "llama3" and shape.arch != "llama"):
        raise _cannot(
            f"rope_type {kind!r} in a {config.model_type} model: GGUF export cannot express it",
            f"llama.cpp would place tokens differently (for {shape.arch} it can do default, linear, yarn"
            f"{', llama3' if shape.arch == 'llama' else ''})",
        )
    turned = rope.get("partial_rotary_factor", 1.0)
    if turned != 1.0:
        raise _cannot(f"partial_rotary_factor {turned}: llama.cpp's {shape.arch} rotates whole heads")
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind == "yarn":
        _add_yarn(writer, config, rope)
    elif kind == "llama3":
        factors = _llama3_factors(config, shape.head_dim, float(rope["rope_theta"]))
        return [Entry(name="rope_freqs.weight", shape=tuple(factors.shape), load=lambda: factors)]
    return []


def _add_yarn(writer: gguf.GGUFWriter, config: Any, rope: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope.get("truncate", True) is not True:
        raise _cannot(
            "rope_parameters.truncate=false with yarn: llama.cpp always rounds the range",
            "the exported model would place tokens differently",
        )
    original = rope["original_max_position_embeddings"]
    factor = float(rope["factor"] or config.max_position_embeddings / original)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast") or 32))
    writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow") or 1))
    # llama.cpp applies the paper's attention factor by itself and multiplies it by this key.
    _, wanted = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    own = ("attention_factor", "mscale", "mscale_all_dim")
    paper_rope = {key: value for key, value in rope.items() if key not in own}
    plain = type(config)(**{**config.to_dict(), "rope_parameters": paper_rope})
    _, paper = ROPE_INIT_FUNCTIONS["yarn"](plain, torch.device("cpu"))
    writer.add_rope_scaling_attn_factors(wanted / paper)


def _llama3_factors(config: Any, head_dim: int, theta: float) -> torch.Tensor:
    """By how much Llama 3 divides each rotary frequency."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return plain / scaled


def _window_notes(config: Any) -> list[str]:
    window = getattr(config, "sliding_window", None)
    if not window or window >= config.max_position_embeddings:
        return []
    return [
        f"the model attends to the last {window} tokens only; llama.cpp attends to all: "
        f"the two agree up to {window} tokens"
    ]
