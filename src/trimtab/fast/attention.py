"""Attention over rows that lie end to end in one sequence: no row sees another, and no mask is made.

Registered with transformers as an attention like `sdpa`, which it is for every batch that is not marked as ours: the
mark is an attention mask without a column, which transformers hands on as it is, so that nothing is built, and nothing
asked of a device, for it. On a GPU torch's own flash kernels take the rows' bounds; elsewhere SDPA goes row by row.
Rows of one length lie side by side, and are plain causal SDPA. It computes what `sdpa` does and nothing more: what a
model asks for besides (capped scores, sinks, biases) is refused, and the caller falls back.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from trimtab.models.load import shapes_only

NAME = "trimtab_rows"
FLASH_DTYPES = (torch.bfloat16, torch.float16)
noted: list[Asked] | None = None
"""While a model is tried: the layers that asked."""


class Asked(NamedTuple):
    """What a layer told its attention."""

    layer: int | None
    window: int | None
    bounds: bool
    """Whether it handed on where rows end."""


class NotForRows(ValueError):
    """A model asks its attention for something that rows laid end to end do not get here."""


def no_mask(device: torch.device | str) -> torch.Tensor:
    """The mark of a batch whose rows are told apart by their bounds, or lie side by side in full."""
    return torch.empty((1, 1, 1, 0), device=device)


def register() -> None:
    """Make the attention known to transformers by its name; a mask for other batches is what `sdpa` has."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, rows_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def flash_takes(device: torch.device, dtype: torch.dtype, head: int) -> bool:
    """Whether the flash kernels of this torch take rows of these sizes on this GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and _flash_sizes(dtype, head)


def _flash_sizes(dtype: torch.dtype, head: int) -> bool:
    return dtype in FLASH_DTYPES and head <= 256 and head % 8 == 0


def rows_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: `[batch, heads, tokens, size]` in, `[batch, tokens, heads, size]` out."""
    if attention_mask is None or attention_mask.shape[-1]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        more |= {} if sliding_window is None else {"sliding_window": sliding_window}
        told: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **more,
        )
        return told
    _refuse(module, is_causal, query, key, more)
    if noted is not None:
        layer = getattr(module, "layer_idx", None)
        noted.append(Asked(layer, sliding_window, more.get("cu_seq_lens_q") is not None))
    if torch.is_autocast_enabled(query.device.type):
        into = torch.get_autocast_dtype(query.device.type)
        query, key, value = (part.to(into) for part in (query, key, value))
    bounds, shared = more.get("cu_seq_lens_q"), more.get("shared_start", 0)
    window = sliding_window or 0
    if bounds is None:
        return _side_by_side(query, key, value, scaling, dropout, window), None
    if query.is_cuda and _plain(query) and not dropout and not shared:
        return _by_flash(query, key, value, bounds, more["max_length_q"], scaling, window), None
    ends = bounds.tolist()
    lengths = [b - a for a, b in pairwise(ends)]
    # Split, not sliced: the backward pass then joins the parts instead of filling zeros around each of them.
    parts = [list(part.split(lengths, 2)) for part in (query, key, value)]
    if shared:
        assert lengths[0] == shared, "what is shared comes first"
        _see_the_start(parts[1], parts[2])
    # A size of its own for the values (DeepSeek's) is no matter here.
    out = [_causal(q, k, v, scaling, dropout, window) for q, k, v in zip(*parts, strict=True)]
    return torch.cat([part.transpose(1, 2) for part in out], 1), None


def _see_the_start(keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """What stands once, before all rows that begin with it: each of them sees it, and its own."""
    for parts in (keys, values):
        parts[1:] = [torch.cat((parts[0], part), 2) for part in parts[1:]]


def _refuse(
    module: Any, is_causal: bool | None, query: torch.Tensor, key: torch.Tensor, more: dict[str, Any]
) -> None:
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    for name in ("softcap", "s_aux", "position_bias"):
        if more.get(name) is not None:
            raise NotForRows(f"its attention takes {name}")
    if not causal:
        raise NotForRows("its attention looks ahead")
    if query.shape[2] != key.shape[2]:
        raise NotForRows("its attention keeps earlier keys")


def _plain(tensor: torch.Tensor) -> bool:
    """A virtual GPU's tensors are of a class of their own; those of a compiler, and shapes, stand for real ones."""
    return type(tensor) is torch.Tensor or torch.compiler.is_compiling() or shapes_only()


def _side_by_side(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
    window: int,
) -> torch.Tensor:
    batch, _, length, _ = query.shape
    if window and length > window and query.is_cuda and _plain(query) and not dropout:
        bounds = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        laid = [part.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for part in (query, key, value)]
        out = _by_flash(laid[0], laid[1], laid[2], bounds, length, scaling, window)
        return out.view(batch, length, *out.shape[2:])
    return _causal(query, key, value, scaling, dropout, window).transpose(1, 2).contiguous()


def _causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
    window: int,
) -> torch.Tensor:
    length, seen = query.shape[2], key.shape[2]
    plain = length == seen and not (window and length > window)
    band = None if plain else _band(length, seen, window, query.device, query.dtype)
    told: torch.Tensor = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=band,
        dropout_p=dropout,
        is_causal=band is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return told


def _band(length: int, seen: int, window: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The last `length` of `seen` tokens: each sees itself and all before it, or `window - 1` of them."""
    place = torch.arange(seen, device=device)
    back = place[seen - length :, None] - place
    hidden = (back < 0) | (back >= window) if window else back < 0
    return torch.zeros(length, seen, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _by_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: int,
) -> torch.Tensor:
    size, own = query.shape[-1], value.shape[-1]
    if own != size:
        value = F.pad(value, (0, size - own))
    flat = [part[0].transpose(0, 1) for part in (query, key, value)]
    scale = size**-0.5 if scaling is None else scaling
    told: torch.Tensor
    told, _ = _flash_rows(flat[0], flat[1], flat[2], bounds, longest, scale, window)
    return told[None, ..., :own]


# One opaque operation for a compiler, sizes symbolic: it neither looks inside nor compiles it again for other rows.
@torch.library.custom_op("trimtab::flash_rows", mutates_args=())
def _flash_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[tokens, heads, size]`, and for the backward pass the logarithms of the sums of each row's weights."""
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=window - 1 if window else -1,
        window_size_right=0,
    )
    # Its layout is the query's, which a compiler is free to choose.
    return out.contiguous(), sums


@_flash_rows.register_fake
def _(query: Any, key: Any, value: Any, bounds: Any, longest: int, scale: float, window: int) -> Any:
    sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return query.new_empty(query.shape), sums


@torch.library.custom_op("trimtab::flash_rows_backward", mutates_args=())
def _flash_rows_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Without dropout the state of the random numbers is not read.
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, device=query.device)
    found = torch.ops.aten._flash_attention_backward(
        gradient.contiguous(),
        query,
        key,
        value,
        out,
        sums,
        bounds,
        bounds,
        longest,
        longest,
        0.0,
        True,
        state,
        unused,
        scale=scale,
        window_size_left=window - 1 if window else -1,
        window_size_right=0,
    )
    return found[0].contiguous(), found[1].contiguous(), found[2].contiguous()


@_flash_rows_backward.register_fake
def _(gradient: Any, query: Any, key: Any, value: Any, *more: Any) -> Any:
    return tuple(part.new_empty(part.shape) for part in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, bounds, *ctx.sizes = inputs
    ctx.save_for_backward(query, key, value, *output, bounds)


def _back(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    found = _flash_rows_backward(gradient, *ctx.saved_tensors, *ctx.sizes)
    return (*found, None, None, None, None)


_flash_rows.register_autograd(_back, setup_context=_keep)
