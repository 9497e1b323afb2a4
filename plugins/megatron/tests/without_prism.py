"""Runs a script that says `cuda` and `nccl` on CPUs and over gloo, and without anything else of Prism: for torchrun.

    torchrun --nproc-per-node 8 without_prism.py megatron_job.py --tp 2

It holds no test.
"""

import os
import runpy
import sys

from prism_sdk.runtime import oncpu

oncpu.install(num_devices=int(os.environ["LOCAL_WORLD_SIZE"]))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
