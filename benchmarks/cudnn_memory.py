"""What cuDNN takes for convolutions and recurrent layers: measured on a GPU, or predicted, as `op_memory.py` does it.

    python benchmarks/cudnn_memory.py --out measured.json                 # on a GPU: needs torch alone
    python benchmarks/cudnn_memory.py --virtual --compare measured.json   # anywhere: the differences

The same options as there. Shapes are those of residual nets, U-Nets, volumes, speech encoders and language models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import op_memory
import torch
import torch.nn.functional as F
from op_memory import BF16, FP32, HALF, Work, both, case
from torch import Tensor, nn

# batch, channels in, channels out, size, kernel, stride, padding, groups
PLANES = [
    (64, 64, 64, 56, 3, 1, 1, 1),
    (32, 128, 128, 28, 3, 1, 1, 1),
    (128, 256, 256, 14, 3, 1, 1, 1),
    (128, 512, 512, 7, 3, 1, 1, 1),
    (128, 128, 128, 56, 3, 2, 1, 1),
    (12, 3, 48, 256, 3, 1, 1, 1),
    (12, 48, 48, 256, 3, 1, 1, 1),
    (12, 96, 48, 256, 3, 1, 1, 1),
    (12, 768, 768, 16, 3, 1, 1, 1),
    (128, 3, 64, 224, 7, 2, 3, 1),
    (64, 64, 256, 56, 1, 1, 0, 1),
    (128, 1024, 512, 14, 1, 1, 0, 1),
    (128, 256, 512, 56, 1, 2, 0, 1),
    (12, 48, 4, 256, 1, 1, 0, 1),
    (64, 64, 128, 64, 4, 2, 1, 1),
    (64, 3, 192, 224, 4, 4, 0, 1),
    (64, 192, 192, 56, 7, 1, 3, 192),
    (64, 256, 256, 28, 3, 1, 1, 32),
]
GROWING = [(12, 768, 384, 16, 2, 2, 0), (12, 96, 48, 128, 2, 2, 0), (64, 128, 64, 32, 4, 2, 1)]
LINES = [
    (6, 1, 512, 160000, 10, 5, 0, 1),
    (6, 512, 512, 31999, 3, 2, 0, 1),
    (6, 512, 512, 999, 2, 2, 0, 1),
    (6, 768, 768, 499, 128, 1, 64, 16),
    (8, 80, 768, 3000, 3, 1, 1, 1),
    (8, 768, 768, 3000, 3, 2, 1, 1),
    (8, 1536, 1536, 131, 4, 1, 3, 1536),
]
VOLUMES = [
    (4, 1, 32, 96, 3, 1, 1, 1),
    (4, 32, 32, 96, 3, 1, 1, 1),
    (4, 32, 64, 96, 3, 2, 1, 1),
    (4, 128, 128, 24, 3, 1, 1, 1),
    (4, 128, 256, 24, 1, 2, 0, 1),
]
NAMES = {FP32: "fp32", HALF: "fp16", BF16: "bf16"}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def tensor(size: tuple[int, ...], dtype: torch.dtype, last: bool) -> Callable[[], Tensor]:
    def make() -> Tensor:
        made = torch.full(size, 0.5, dtype=dtype, device="cuda")
        made = made.to(memory_format=FORMATS[len(size)]) if last else made
        return made.requires_grad_()

    return make


def convolutions() -> None:
    for dimensions, shapes in ((2, PLANES), (1, LINES), (3, VOLUMES)):
        function = getattr(F, f"conv{dimensions}d")
        for dtype, word in NAMES.items():
            for last in (False, True) if dimensions > 1 else (False,):
                for batch, into, out, size, kernel, stride, padding, groups in shapes:
                    both(
                        f"conv{dimensions}d {word}{' last' if last else ''} {batch}x{into}>{out} {size} "
                        f"k{kernel} s{stride} p{padding} g{groups}",
                        lambda x, w, f=function, s=stride, p=padding, g=groups: f(
                            x, w, None, stride=s, padding=p, groups=g
                        ),
                        tensor((batch, into, *[size] * dimensions), dtype, last),
                        tensor((out, into // groups, *[kernel] * dimensions), dtype, last),
                    )
    for dtype, word in NAMES.items():
        for last in (False, True):
            for batch, into, out, size, kernel, stride, padding in GROWING:
                both(
                    f"transposed {word}{' last' if last else ''} {batch}x{into}>{out} {size} k{kernel} s{stride}",
                    lambda x, w, s=stride, p=padding: F.conv_transpose2d(x, w, None, stride=s, padding=p),
                    tensor((batch, into, size, size), dtype, last),
                    tensor((into, out, kernel, kernel), dtype, last),
                )


# kind, layers, both ways, steps, batch, in, hidden, dropout
RECURRENT = [
    ("LSTM", 1, False, 128, 128, 1024, 1024, 0.0),
    ("LSTM", 3, False, 128, 128, 1024, 1024, 0.5),
    ("LSTM", 3, False, 128, 128, 1024, 1024, 0.0),
    ("LSTM", 1, False, 64, 128, 1024, 1024, 0.0),
    ("LSTM", 1, False, 128, 64, 1024, 1024, 0.0),
    ("LSTM", 1, False, 128, 128, 512, 1024, 0.0),
    ("LSTM", 1, False, 128, 128, 1024, 512, 0.0),
    ("LSTM", 2, False, 35, 20, 650, 650, 0.5),
    ("LSTM", 2, True, 100, 32, 300, 256, 0.0),
    ("LSTM", 2, True, 100, 32, 300, 256, 0.3),
    ("LSTM", 1, False, 1, 64, 256, 256, 0.0),
    ("GRU", 1, False, 128, 128, 1024, 1024, 0.0),
    ("GRU", 2, False, 128, 64, 512, 1024, 0.2),
    ("GRU", 3, True, 200, 16, 80, 320, 0.1),
    ("RNN", 2, False, 100, 64, 256, 512, 0.0),
]


def recurrent() -> None:
    for kind, layers, twice, steps, batch, into, hidden, dropout in RECURRENT:
        for dtype, word in NAMES.items():
            ways = " both ways" if twice else ""
            name = f"{kind} {word} layers {layers}{ways} {steps}x{batch} {into}>{hidden} drop {dropout}"

            def make(
                kind: str = kind,
                into: int = into,
                hidden: int = hidden,
                layers: int = layers,
                dropout: float = dropout,
                twice: bool = twice,
                dtype: torch.dtype = dtype,
                steps: int = steps,
                batch: int = batch,
            ) -> tuple[Any, Tensor]:
                layer = getattr(nn, kind)(into, hidden, layers, dropout=dropout, bidirectional=twice)
                return layer.to("cuda", dtype), torch.full(
                    (steps, batch, into), 0.5, dtype=dtype, device="cuda"
                )

            def forward(make: Callable[[], tuple[Any, Tensor]] = make) -> Work:
                layer, x = make()
                x.requires_grad_()
                return lambda: layer(x)

            def backward(make: Callable[[], tuple[Any, Tensor]] = make) -> Work:
                layer, x = make()
                out = layer(x.requires_grad_())[0]
                grad = torch.ones_like(out)
                return lambda: torch.autograd.backward(out, grad)

            def evaluated(make: Callable[[], tuple[Any, Tensor]] = make) -> Work:
                layer, x = make()
                layer.eval()

                def work() -> Any:
                    with torch.no_grad():
                        return layer(x)

                return work

            case(name, forward)
            case(f"{name} | backward", backward)
            case(f"{name} | evaluated", evaluated)


# kind, layers, both ways, in, hidden, dropout, lengths of the rows
EVEN, RAMP, ONE_LONG = [96] * 48, [96 - row for row in range(0, 72, 2)], [96] + [12] * 47
PACKED = [
    ("GRU", 2, True, 512, 1024, 0.3, RAMP),
    ("GRU", 2, True, 512, 1024, 0.3, ONE_LONG),
    ("GRU", 2, True, 512, 1024, 0.3, EVEN),
    ("GRU", 1, False, 512, 1024, 0.0, RAMP),
    ("GRU", 1, False, 512, 1024, 0.0, ONE_LONG),
    ("GRU", 1, True, 512, 1024, 0.0, RAMP),
    ("GRU", 3, False, 512, 320, 0.1, RAMP),
    ("LSTM", 1, False, 512, 1024, 0.0, RAMP),
    ("LSTM", 2, False, 256, 640, 0.2, RAMP),
    ("LSTM", 2, True, 300, 256, 0.3, RAMP),
    ("LSTM", 2, True, 300, 256, 0.3, ONE_LONG),
    ("RNN", 2, False, 256, 512, 0.0, RAMP),
]


def packed() -> None:
    for kind, layers, twice, into, hidden, dropout, lengths in PACKED:
        for dtype in (FP32, HALF):
            word = {id(EVEN): "even", id(RAMP): "ramp", id(ONE_LONG): "one long"}[id(lengths)]
            ways = " both ways" if twice else ""
            name = f"packed {kind} {NAMES[dtype]} layers {layers}{ways} {into}>{hidden} drop {dropout} {word}"

            def make(
                kind: str = kind,
                shape: tuple[int, int, int] = (into, hidden, layers),
                more: tuple[float, bool] = (dropout, twice),
                dtype: torch.dtype = dtype,
                lengths: list[int] = lengths,
            ) -> tuple[Any, Any]:
                layer = getattr(nn, kind)(*shape, dropout=more[0], bidirectional=more[1]).to("cuda", dtype)
                given = torch.full((max(lengths), len(lengths), shape[0]), 0.5, dtype=dtype, device="cuda")
                return layer, nn.utils.rnn.pack_padded_sequence(given.requires_grad_(), torch.tensor(lengths))

            def forward(make: Callable[[], tuple[Any, Any]] = make) -> Work:
                layer, rows = make()
                return lambda: layer(rows)

            def backward(make: Callable[[], tuple[Any, Any]] = make) -> Work:
                layer, rows = make()
                out = layer(rows)[0].data
                grad = torch.ones_like(out)
                return lambda: torch.autograd.backward(out, grad)

            def evaluated(make: Callable[[], tuple[Any, Any]] = make) -> Work:
                layer, rows = make()
                layer.eval()

                def work() -> Any:
                    with torch.no_grad():
                        return layer(rows)

                return work

            case(name, forward)
            case(f"{name} | backward", backward)
            case(f"{name} | evaluated", evaluated)


def every_case() -> None:
    convolutions()
    recurrent()
    packed()


if __name__ == "__main__":
    sys.exit(op_memory.main(every_case))
