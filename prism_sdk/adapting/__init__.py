"""For authors of framework adapters: declaring hooks, wrapping and restoring them, and the words for names.

It imports no framework and knows nothing of traces: what names become is the runtime's business.

- `PatchingAdapter`: an adapter as a table of `Around`, one for each function that it wraps.
- `ScheduleParts`: tells warmup, steady and cooldown of a pipeline schedule apart while it runs.
- `OfObjects`: what an adapter knows of modules, parameters and the like, as long as they live.
- `PARTS`, `SCHEDULE_PARTS`, `TOKENS_PER_EXPERT`: the vocabulary.
"""

from prism_sdk.adapting.objects import OfObjects
from prism_sdk.adapting.patching import Around, PatchingAdapter
from prism_sdk.adapting.schedule import ScheduleParts
from prism_sdk.adapting.vocabulary import PARTS, SCHEDULE_PARTS, TOKENS_PER_EXPERT

__all__ = ["Around", "OfObjects", "PARTS", "PatchingAdapter", "SCHEDULE_PARTS", "ScheduleParts", "TOKENS_PER_EXPERT"]
