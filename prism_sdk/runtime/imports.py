"""Says which slow imports a program has made, so that who runs it again makes them once, before ranks are forked.

Responsible for torch's own modules alone: what others do when they are imported may depend on the rank, on its GPU or
on what the program did before.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["made_ahead", "settings_of", "slow_imports"]

# torch.compile imports this as soon as something is decorated, in 1.6 s; next to nothing else of torch takes 0.1 s
# after what preload.py has imported
_SLOW = ("torch._inductor.compile_fx",)
_READS = ("TORCH", "TRITON", "INDUCTOR")  # how variables begin that these read when they are imported
_SETS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # by torch's compiler itself, for its processes
_GPUS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))  # of NVIDIA, of it under Windows, of AMD


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that such an import may read."""
    return {key: value for key, value in environ.items() if key.startswith(_READS) and key not in _SETS}


def slow_imports(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """What this process has imported of the slow modules; nothing where the program has set what they read.

    `before` and `now` are the `settings_of` the process at its start and at its end.
    """
    return tuple(name for name in _SLOW if name in sys.modules) if before == now else ()


def made_ahead(recorded: Mapping[str, str]) -> tuple[str, ...]:
    """What to import before ranks are forked, of a graph's metadata: only what we know, and where no GPU is opened."""
    of_ranks = [names for key, names in recorded.items() if key.startswith("rank.") and key.endswith(".imports")]
    named = {name for names in of_ranks for name in names.split(",")}
    if any(device.exists() for device in _GPUS):
        return ()
    return tuple(name for name in _SLOW if name in named)
