"""What a launcher tells a rank by its environment: the same numbers as torchrun's, under the launcher's own names.

MASTER_ADDR and MASTER_PORT are always set: where ranks meet is for a job's script to say, which is not rehearsed here.
"""

from __future__ import annotations

from trimtab.rehearse.target import Launcher


def of(launcher: Launcher, torchrun: dict[str, str]) -> dict[str, str]:
    """The variables of a rank, given those that torchrun would set."""
    if launcher == "torchrun":
        return torchrun
    rank, world, local, per_node, node, nodes = (
        torchrun[name]
        for name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
        )
    )
    meeting = {name: torchrun[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    if launcher == "mpirun":
        named = {"RANK": rank, "SIZE": world, "LOCAL_RANK": local, "LOCAL_SIZE": per_node}
        return meeting | {f"OMPI_COMM_WORLD_{name}": value for name, value in named.items()}
    return meeting | {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local,
        "SLURM_NODEID": node,
        "SLURM_NTASKS": world,
        "SLURM_STEP_NUM_TASKS": world,
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_TASKS_PER_NODE": per_node if nodes == "1" else f"{per_node}(x{nodes})",
        "SLURM_STEP_TASKS_PER_NODE": per_node if nodes == "1" else f"{per_node}(x{nodes})",
        "SLURM_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_STEP_NODELIST": "localhost",
    }
