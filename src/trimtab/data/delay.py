"""The delay pattern of audio codes: codebook k stands k columns later, between a stream's own BOS and EOS.

T frames of K codebooks become T + 2 + K - 1 columns. In every codebook one BOS opens the stream and one EOS ends it;
the triangles that the shift leaves are filled with more of the same, which is never trained:

    k = 0   BOS  a0   a1   EOS  eos  eos
    k = 1   bos  BOS  b0   b1   EOS  eos          (small: fill)
    k = 2   bos  bos  BOS  c0   c1   EOS

Knows tensors alone: no file, no model, no token of the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.data.render import IGNORED
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor


def delayed(codes: Tensor, bos: int, eos: int, where: str = "a clip") -> Tensor:
    """The columns (T + 2 + K - 1, K) that stand for these codes (T, K). `where` names the clip in an error."""
    import torch

    if codes.dim() != 2:
        raise RequestError.of(
            f"{where}: audio codes of shape {tuple(codes.shape)}",
            "a clip is (frames, codebooks)",
            "give the codes of one clip, frames first",
        )
    most = min(bos, eos) - 1
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) <= most:
        raise RequestError.of(
            f"{where}: audio codes from {int(codes.min())} to {int(codes.max())}",
            f"the model knows the codes 0 to {most}; what is above them begins and ends a stream",
            "use the codec that the model was made for (voice.codec), with as many entries a codebook",
        )
    one = codes.new_ones(1, codes.shape[1])
    # Before the stream its first row is repeated and behind it the last: the fills come by themselves.
    return _shifted(torch.cat([one * bos, codes, one * eos]).long(), codes.shape[0] + 2)


def delayed_labels(codes: Tensor, eos: int) -> Tensor:
    """What is to be predicted in each of those columns: the codes and the first EOS of each codebook; else -100.

    The first column of a clip is thus ignored in every codebook. A shifted loss over several clips in one sequence
    therefore never asks the end of one clip for the beginning of the next.
    """
    import torch

    one = codes.new_ones(1, codes.shape[1])
    stream = torch.cat([one * IGNORED, codes, one * eos, one * IGNORED]).long()
    return _shifted(stream, codes.shape[0] + 2)


def undelayed(columns: Tensor) -> Tensor:
    """The codes (T, K) that `delayed` made these columns (T + 2 + K - 1, K) of."""
    count, books = columns.shape
    frames = count - books - 1
    if frames < 0:
        raise RequestError.of(
            f"{count} columns of {books} codebooks",
            f"BOS, EOS and the delay alone take {books + 1}",
            "give whole columns, from the one that is all BOS to the one that is all EOS",
        )
    return _straight(columns[1:], frames)


def spoken(columns: Tensor, bos: int, eos: int) -> tuple[Tensor, bool]:
    """The codes (T, K) in columns that a model made, from the one that is all BOS on; and whether it ended by itself.

    It may have been cut off anywhere, and its codebooks may end earlier or later than the pattern says: the clip is
    what comes before the first frame that lacks a code.
    """
    frames = max(columns.shape[0] - columns.shape[1], 0)
    codes = _straight(columns[1:], frames)
    gone = (codes >= min(bos, eos)).any(dim=1).nonzero()
    whole = int(gone[0]) if len(gone) else frames
    # Codebook 0 runs ahead of the last whole frame, so its end may be there though no frame tells it.
    return codes[:whole], bool((columns[:, 0] == eos).any())


def _shifted(stream: Tensor, length: int) -> Tensor:
    """Codebook k of the stream, k rows later; beyond both ends its first and its last row."""
    import torch

    books = stream.shape[1]
    places = torch.arange(length + books - 1, device=stream.device)[:, None] - torch.arange(
        books, device=stream.device
    )
    return stream.gather(0, places.clamp(0, len(stream) - 1))


def _straight(columns: Tensor, frames: int) -> Tensor:
    """Row t of codebook k from row t + k."""
    import torch

    books = torch.arange(columns.shape[1], device=columns.device)
    return columns.gather(0, torch.arange(frames, device=columns.device)[:, None] + books)
