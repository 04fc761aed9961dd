"""Starts its own ranks by torchrun's launcher. What a rank does at its end is the argument: abort, exit or wait."""

import atexit
import os
import sys
import time

if sys.argv[-1] == "abort":
    # Registered before torch is imported, it runs after everything else: as late as a thread of gloo would abort.
    atexit.register(os.abort)

if "RANK" in os.environ:
    if sys.argv[-1] == "wait" and os.environ["RANK"] == "1":
        time.sleep(6)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    total = total.cuda()
    dist.destroy_process_group()
    print("rank", os.environ["RANK"], "of", int(total))
    sys.exit(3 if sys.argv[-1] == "exit" else 0)

atexit.unregister(os.abort)
from torch.distributed.run import main  # noqa: E402

count = "2" if sys.argv[-1] == "wait" else "1"
main(["--standalone", "--nproc-per-node", count, __file__, sys.argv[-1]])
