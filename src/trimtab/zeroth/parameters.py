"""Which tensors a zeroth-order run tunes, in which order, and what part each plays in its layer.

The order is that of `named_parameters`, a tied tensor once; a tensor's position in it is part of its noise counter.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trimtab.errors import RequestError

# What architectures call the parts of their attention and feed-forward layers. A fused tensor has all its roles.
_ROLES = {
    "query": "q_proj query wq q to_q q_lin query_proj q_attn q_b_proj linear_q",
    "key": "k_proj key wk k to_k k_lin key_proj k_attn linear_k",
    "value": "v_proj value wv v to_v v_lin value_proj v_attn linear_v",
    "query_key_value": "query_key_value c_attn qkv qkv_proj wqkv w_pack att_proj in_proj_weight to_qkv attn_qkv",
    "key_value": "kv_proj kv_b_proj wkv kv to_kv key_value",
    "query_value": "wqv qv_proj",
    "output": "o_proj out_proj wo o to_out out_lin attn_out",
    "gate": "gate_proj w1",
    "up": "up_proj w3 fc1 c_fc fc_in dense_h_to_4h",
    "gate_up": "gate_up_proj gate_and_up_proj",
    "down": "down_proj w2 fc2 fc_out dense_4h_to_h",
}
_ROLE_OF = {word: role for role, words in _ROLES.items() for word in words.split()}
ROLES = ("query", "key", "value", "output", "gate", "up", "down")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Tuned:
    """A tensor that is tuned."""

    name: str
    parameter: nn.Parameter
    index: int
    role: str
    """`query`, `value`, …; `query_key_value` where they are one tensor; empty where its name tells none."""

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices: biases and the weights of norms have one dimension."""
        return self.parameter.dim() >= 2

    def plays(self, roles: Iterable[str]) -> bool:
        return not set(self.role.split("_")).isdisjoint(roles)


def role_by_name(name: str) -> str:
    """The role of a parameter by its name: the innermost part that is known decides."""
    for part in reversed(name.lower().split(".")):
        if part in _ROLE_OF:
            return _ROLE_OF[part]
    return ""


def tuned_parameters(model: nn.Module) -> list[Tuned]:
    """Every tensor of the model that requires a gradient."""
    tuned = [
        Tuned(name, parameter, index, role_by_name(name))
        for index, (name, parameter) in enumerate(
            (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        )
    ]
    if not tuned:
        raise RequestError.of(
            "no parameter of the model requires a gradient",
            "a zeroth-order run moves exactly those that do",
            "unfreeze the model, or add an adapter to it",
        )
    for each in tuned:
        if each.parameter.dtype not in _DTYPES:
            raise RequestError.of(
                f"{each.name} is of type {each.parameter.dtype}",
                "zeroth-order steps are computed in fp32 and rounded to fp32, bf16 or fp16",
                "load the model in one of these, or freeze the tensor",
            )
        if each.parameter.is_meta:
            raise RequestError.of(
                f"{each.name} is on the meta device (offloaded, or never loaded)",
                "its values are not there to be tuned",
                "load the whole model on devices with room for it",
            )
    return tuned


def projected_parameters(tuned: Sequence[Tuned], roles: Sequence[str]) -> list[Tuned]:
    """The matrices that play one of these roles, adapters' parts included. None at all is an error."""
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise RequestError.of(
            f"projection_roles: {', '.join(unknown)}",
            "no such role is known",
            f"choose from {', '.join(ROLES)}",
        )
    chosen = [each for each in tuned if each.parameter.dim() >= 2 and each.plays(roles)]
    if not chosen:
        parts = sorted({_module_of(each.name) for each in tuned if each.parameter.dim() >= 2})
        raise RequestError.of(
            f"projection_roles: {', '.join(roles)} matches none of the {len(tuned)} tuned tensors",
            "DiZO without a tensor to project would be MeZO under another name",
            "choose projection_roles that are there, or tune those layers too; the tuned modules are called "
            + ", ".join(parts[:40])
            + (" …" if len(parts) > 40 else ""),
        )
    return chosen


def _module_of(name: str) -> str:
    """The last part of a parameter's name that says what it is: not `weight`, a number or an adapter's name."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    ends = [i for i, part in enumerate(parts) if part.startswith("lora_")]
    parts = parts[: ends[0]] if ends else parts[:-1]
    return parts[-1] if parts else name


def fingerprint(tuned: Sequence[Tuned]) -> str:
    """A hash of the names, shapes and types of the tuned tensors: two models that differ in it share no run."""
    lines = [f"{t.name} {tuple(t.parameter.shape)} {t.parameter.dtype}" for t in tuned]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def weights_mark(tuned: Sequence[Tuned], elements: int = 1024) -> int:
    """A checksum over the first elements of each tensor: tells other weights apart in milliseconds."""
    mark = 0
    for each in tuned:
        first = each.parameter.detach().reshape(-1)[:elements].cpu().contiguous()
        mark = zlib.crc32(bytes(first.view(torch.uint8).tolist()), mark)
    return mark
