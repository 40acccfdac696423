"""What each rank of a torchrun timed of collectives, for test_calibrate_ranks.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from batchwright.timing.calibrate_ranks import time_collectives


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    curves = time_collectives("cpu", largest=1 << 16)
    Path(folder, os.environ["RANK"]).write_text(json.dumps(curves))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
