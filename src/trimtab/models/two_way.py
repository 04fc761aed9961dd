"""Calls a causal decoder of transformers so that every token sees every other one, and proves that it does.

The mask is four-dimensional, which all models of transformers take as it is: full and sliding layers alike then see the
whole row. Whether an architecture heeds it is asked of the model itself, by gradients. Never changes the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from trimtab.errors import RequestError
from trimtab.models.picture_features import innermost, picture_arguments, pictures_repeated
from trimtab.placement import bare_model, on_several_devices

if TYPE_CHECKING:
    import torch

Batch = dict[str, Any]


class TwoWay:
    """What has to be known of one model to call it in both directions."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model: Any = bare_model(model)
        self.pictures = picture_arguments(self.model)
        self.shares = False
        """Whether the copies of a row share what the tower made of its pictures; `check` finds it out."""
        takes = inspect.signature(self.model.forward).parameters
        self.keeps = "logits_to_keep" in takes
        """Whether the model makes logits of chosen columns only."""
        self.split = on_several_devices(self.model)
        """Whether its head may lie elsewhere than its inputs: columns are then told as a number from the end."""
        self._any = any(one.kind is one.VAR_KEYWORD for one in takes.values())
        self._takes = set(takes)
        self.asks = "question_mask" in takes
        """Whether the model's tokens of a picture depend on its question, which is then told apart from the answer."""
        self._rope = innermost(self.model, "get_rope_index")

    def reachable(self, columns: torch.Tensor, width: int) -> torch.Tensor | None:
        """Those columns, or all from the first of them on where only that can be told; None where nothing can."""
        import torch

        if not self.keeps or not len(columns):
            return None
        return torch.arange(int(columns[0]), width, device=columns.device) if self.split else columns

    def mask(self, real: torch.Tensor) -> torch.Tensor:
        """From (rows, columns), true where a token stands, to (rows, 1, columns, columns).

        Padding sees the tokens too: it is read by nothing, and a place that saw none would be a NaN.
        """
        import torch

        rows, columns = real.shape
        seen = real.bool()[:, None, None, :]
        config = getattr(self.model, "config", None)
        text = config.get_text_config() if config is not None else None
        if getattr(text, "_attn_implementation", None) != "sdpa":
            # Eager attention adds the mask to its scores; true and false would be added as 1 and 0.
            dtype = next(w.dtype for w in self.model.parameters() if w.is_floating_point())
            seen = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        return seen.expand(rows, 1, columns, columns)

    def inputs(
        self,
        ids: torch.Tensor,
        real: torch.Tensor,
        others: Mapping[str, Any],
        columns: torch.Tensor | None = None,
    ) -> Batch:
        """The arguments of a pass over `ids`, which hold the rows of `real` and `others` once or several times over.

        `columns` are those whose logits are wanted (`reachable` ones), where the model can be told.
        """
        import torch

        copies = len(ids) // len(real)
        tiled = {
            name: value if self.shares and name in self.pictures else _again(value, copies)
            for name, value in others.items()
            if name not in ("input_ids", "attention_mask", "labels", "position_ids")
        }
        made = {"input_ids": ids, "attention_mask": self.mask(_again(real, copies)), **tiled}
        positions = self._positions(ids[: len(real)], real, others)
        if positions is not None:
            made["position_ids"] = torch.cat([positions] * copies, dim=1)
        if columns is not None and self.keeps:
            made["logits_to_keep"] = ids.shape[1] - int(columns[0]) if self.split else columns
        if self._any or "use_cache" in self._takes:
            made["use_cache"] = False
        return made

    def _positions(
        self, ids: torch.Tensor, real: torch.Tensor, others: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Places in time, height and width, which such a model would read from a two-dimensional mask."""
        if self._rope is None or not any(name.endswith("grid_thw") for name in others):
            return None
        known = {**others, "input_ids": ids, "attention_mask": real.long()}
        takes = inspect.signature(self._rope.get_rope_index).parameters
        positions, _ = self._rope.get_rope_index(**{name: known[name] for name in takes if name in known})
        return positions  # type: ignore[no-any-return]

    def repeating(self, copies: int) -> Any:
        """Open this around a pass over `copies` of the rows: the tower then sees each picture once."""
        return pictures_repeated(self.model, copies) if self.shares else nullcontext()

    def check(self, batch: Mapping[str, Any], filler: int) -> None:
        """Refuse a model in which a later token changes no earlier logit, or in which padding changes any.

        By the gradient of the first column's logits with respect to the embedded tokens: it is exactly zero where
        nothing flows. `batch` is a small one of the collator; where it has pictures, this also finds whether a row's
        copies can share them. Before the model is wrapped: ranks need not agree on a batch.
        """
        import torch

        was, self.shares = self.model.training, False
        self.model.eval()
        try:
            with torch.no_grad():
                # What fails here is the batch's fault, and says so itself.
                self.model(**{name: value for name, value in batch.items() if name != "labels"})
            later, padding = self._flow(with_columns(batch, 1, filler))
            self.shares = later and not padding and self._same_when_shared(batch)
        finally:
            self.model.train(was)
        if not later:
            raise self._refusal(
                "a later token changes no earlier logit: it ignores the mask, or reads in order"
            )
        if padding:
            raise self._refusal("padding changes the logits of the tokens before it: it ignores the mask")

    def _refusal(self, why: str) -> RequestError:
        text = getattr(self.model, "config", None)
        how = getattr(text.get_text_config() if text else None, "_attn_implementation", None)
        return RequestError.of(
            f"vision.objective=masked_diffusion needs attention in both directions, and {type(self.model).__name__}"
            + (f" (attention: {how})" if how else "")
            + " does not give it",
            why,
            "choose a decoder with plain attention (Llama, Qwen, Gemma …) and attention sdpa or eager, "
            "or set vision.objective=causal",
        )

    def _flow(self, batch: Mapping[str, Any]) -> tuple[bool, bool]:
        """Whether the first column's logits hear of each row's last token, and whether they hear of any padding."""
        import torch

        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        embedded: list[torch.Tensor] = []

        def embed(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
            embedded.append(out.detach().requires_grad_(True))
            return embedded[-1].clone()  # a model may write its pictures into it

        hook = self.model.get_input_embeddings().register_forward_hook(embed)
        try:
            with torch.enable_grad():
                logits = self.model(**self.inputs(ids, real, batch)).logits
                # Their length: no symmetry of the head cancels, and its gradient is of a size that fp16 holds.
                (heard,) = torch.autograd.grad(logits[:, 0].float().norm(dim=-1).sum(), embedded[:1])
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise self._refusal(f"it takes no mask of its own ({type(error).__name__}: {error})") from error
        finally:
            hook.remove()
        heard = heard.abs().sum(-1)
        last = heard.gather(1, real.long().sum(1, keepdim=True) - 1)
        return bool((last > 0).all()), bool((heard[~real] != 0).any())

    def _same_when_shared(self, batch: Mapping[str, Any]) -> bool:
        """Whether two copies of the rows get the same logits when the tower sees their pictures once."""
        import torch

        if not any(isinstance(batch.get(name), torch.Tensor) for name in self.pictures):
            return False
        twice, real = _again(batch["input_ids"], 2), batch["attention_mask"].bool()
        with torch.no_grad():
            apart = self.model(**self.inputs(twice, real, batch)).logits
            self.shares = True
            try:
                with self.repeating(2):
                    together = self.model(**self.inputs(twice, real, batch)).logits
            except (RuntimeError, TypeError, ValueError, IndexError):
                return False  # so a model says that its tokens and its pictures do not go together
            finally:
                self.shares = False
        error, size = (apart - together)[_again(real, 2)].abs().max(), apart[_again(real, 2)].abs().max()
        return bool(error <= torch.finfo(apart.dtype).eps ** 0.5 * size)


def with_columns(batch: Mapping[str, Any], more: int, filler: int) -> Batch:
    """The batch with `more` columns of padding at its right, in all that it says of each token."""
    import torch

    if more <= 0:
        return dict(batch)
    wider: Batch = dict(batch)
    for name in token_inputs(batch):
        new = {"input_ids": filler, "labels": -100}.get(name, 0)
        wider[name] = torch.cat([batch[name], batch[name].new_full((len(batch[name]), more), new)], dim=1)
    return wider


def token_inputs(batch: Mapping[str, Any]) -> list[str]:
    """What a batch says of each token: integers, in the shape of `input_ids`."""
    import torch

    shape = batch["input_ids"].shape
    return [
        name
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.shape == shape and not value.is_floating_point()
    ]


def _again(value: Any, copies: int) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value if copies == 1 else torch.cat([value] * copies)
    return value * copies if isinstance(value, list | tuple) else value
