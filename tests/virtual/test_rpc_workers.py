"""Two workers of RPC with virtual GPUs: what is simulated between them, and what says that it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.autograd as distributed_autograd
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed import rpc

from trimtab.virtual import virtual_gpus
from trimtab.virtual.state import NotSimulated


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2).cuda()

    def forward(self, rows: Tensor) -> Tensor:
        return self.table(rows.cuda()).cpu()  # type: ignore[no-any-return]


def _worker(rank: int, store: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=store)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        encoder = rpc.remote("worker1", Encoder)
        with distributed_autograd.context() as context:
            found = encoder.rpc_sync().forward(torch.zeros(3, dtype=torch.long))
            assert found.shape == (3, 2)
            with pytest.raises(NotSimulated, match="Distributed autograd"):
                distributed_autograd.backward(context, [found.sum()])
    rpc.shutdown()


@pytest.mark.slow
def test_a_module_on_the_gpu_of_another_worker(tmp_path: Path) -> None:
    with virtual_gpus(2):
        torch.multiprocessing.spawn(_worker, ((tmp_path / "store").as_uri(),), nprocs=2)
