"""`python -m prismtrace_nccl_profiler` prints where the library lies, for NCCL_PROFILER_PLUGIN; nothing else."""

import sys

from prismtrace_nccl_profiler import library_path

sys.stdout.write(f"{library_path()}\n")
