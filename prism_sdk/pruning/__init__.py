"""Communication pruning: what a rank of a large group sends and receives, and what few neighbours must do in its place.

It knows schedules and nothing of tensors, processes or time: buffers are whatever can be sliced, and moving them is
somebody else's. ``programs`` has the full schedule of each member, ``closing`` what stands in for the members that are
left out, ``playing`` carries both out over a :class:`~prism_sdk.pruning.playing.Lanes`. ``native`` has the sizes for a
library's own collectives over the few ranks that are there.
"""

from prism_sdk.pruning.closing import COMBINED, NEUTRAL, Closing, Emission, Intake, closing
from prism_sdk.pruning.native import reduced_size, ring_sends, scaled_count
from prism_sdk.pruning.playing import Lanes, Pending, play, play_closing
from prism_sdk.pruning.programs import Action, Move, Step, Traffic, program, split, traffic

__all__ = [
    "Action",
    "COMBINED",
    "Closing",
    "Emission",
    "Intake",
    "Lanes",
    "Move",
    "NEUTRAL",
    "Pending",
    "Step",
    "Traffic",
    "closing",
    "play",
    "play_closing",
    "program",
    "reduced_size",
    "ring_sends",
    "scaled_count",
    "split",
    "traffic",
]
