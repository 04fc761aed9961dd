"""all_gather_into_tensor on virtual ranks: NCCL counts elements and looks at no shape."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist


@pytest.mark.virtual_gpus(1)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_flat_output_takes_a_matrix() -> None:
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        given = torch.arange(4.0, device="cuda").view(4, 1)
        taken = torch.zeros(4, device="cuda")
        dist.all_gather_into_tensor(taken, given)
        assert taken.tolist() == [0, 1, 2, 3]
        assert taken.is_cuda
    finally:
        dist.destroy_process_group()
