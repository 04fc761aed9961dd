"""`trimtab train CONFIG` in this process, and at its end a line of JSON with the peaks that torch counted."""

from __future__ import annotations

import json
import sys

from trimtab.cli import main

code: object = 0
try:
    sys.argv = ["trimtab", "train", sys.argv[1]]
    main()
except SystemExit as end:
    code = end.code
if not code:
    import torch

    peaks = {
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
    }
    print(json.dumps(peaks))
sys.exit(code)  # type: ignore[arg-type]
