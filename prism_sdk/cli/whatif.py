"""The options that change a simulated job, shared by ``prism simulate`` and ``prism sweep``.

It makes no changes: ``prism_sdk.simulate.scenario`` does.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

import click

from prism_sdk.cli.parsing import Number
from prism_sdk.errors import UsageError

if TYPE_CHECKING:
    from prism_sdk.simulate.scenario import Scenario

__all__ = ["expand_variants", "scenario_of", "what_if_options"]

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--slow",), {"multiple": True, "metavar": "WHERE:FACTOR[@FROM-TO]",
                   "help": "Computing takes FACTOR times as long: rank=17:1.3, stage=2:1.1, rank=3:1.4@2s-5s."}),
    (("--scale",), {"multiple": True, "metavar": "WHERE:FACTOR",
                    "help": "Any units take FACTOR times as long: op=all_reduce:0.5, kind=message:0."}),
    (("--remove",), {"multiple": True, "metavar": "WHERE", "help": "Leave out units: op=all_to_all."}),
    (("--straggle",), {"multiple": True, "metavar": "DIST:SPREAD[:seed=N][:per=unit][:WHERE]",
                       "help": "Random slowness of ranks or units: lognormal, normal, pareto or uniform."}),
    (("--equal",), {"multiple": True, "metavar": "WHERE[:but:WHERE]",
                    "help": "Like units take equally long (the ideal without stragglers): all, all:but:rank=3."}),
    (("--no-gaps",), {"is_flag": True, "help": "No gaps between units, and no delay after waits."}),
    (("--moe-skew",), {"type": Number(min=1), "metavar": "SKEW",
                       "help": "The busiest expert rank gets SKEW times the mean load."}),
    (("--moe-seed",), {"type": click.IntRange(min=0), "default": 0, "metavar": "N", "help": "Which ranks are busy."}),
    (("--microbatches",), {"type": click.IntRange(min=1), "metavar": "N", "help": "Another number of microbatches."}),
    (("--schedule",), {"type": click.Choice(["1f1b", "gpipe"]), "help": "Another pipeline schedule."}),
    (("--dp",), {"type": click.IntRange(min=1), "metavar": "N", "help": "Another number of data-parallel replicas."}),
    (("--dp-groups",), {"multiple": True, "metavar": "NAME", "help": "A data-parallel group by name."}),
    (("--cluster",), {"metavar": "PROFILE", "help": "Take transfers from this cluster profile."}),
    (("--transfers",), {"type": click.Choice(["all", "missing"]), "default": "all",
                        "help": "With --cluster: replace all transfers (default), or those that the graph lacks."}),
    (("--link-sharing/--no-link-sharing",), {"default": None, "help": "With --cluster: whether transfers that overlap "
                                             "share links (default: with --transfers all)."}),
    (("--link",), {"multiple": True, "metavar": "KEY=VALUE|KEY=xFACTOR",
                   "help": "With --cluster: change a link, network.bandwidth_gb_per_s=x0.5."}),
)  # fmt: skip


def what_if_options(function: F) -> F:
    """Adds the options to a command, in this order."""
    for names, settings in reversed(_OPTIONS):
        function = click.option(*names, **settings)(function)
    return function


def scenario_of(values: dict[str, Any]) -> Scenario:
    """The scenario of parsed options."""
    from prism_sdk.simulate.scenario import Scenario

    return Scenario(**values)


@click.command(add_help_option=False)
@what_if_options
def _words(**values: Any) -> dict[str, Any]:
    return values


def _parse(words: list[str], text: str) -> Scenario:
    try:
        values = _words.main(args=words, prog_name="variant", standalone_mode=False)
    except click.ClickException as error:
        raise UsageError(f"variant {text!r}: {error.format_message()}") from error
    return scenario_of(values)


def expand_variants(texts: tuple[str, ...]) -> list[tuple[str, Scenario]]:
    """``NAME=OPTIONS`` or ``OPTIONS``; ``{a,b}`` in the options stands for several, in all combinations."""
    found: list[tuple[str, Scenario]] = []
    for text in texts:
        has_name = "=" in text and text.strip()[0] not in "-{="
        name, options = text.split("=", 1) if has_name else ("", text)
        every = _expanded(options)
        if not any(chosen.strip() for chosen in every):
            hint = "give options of `prism simulate`, such as '--slow rank=0:1.2'; the job as it is has the first row"
            raise UsageError(f"variant {text!r}: it says no change", hint=hint)
        for chosen in every:
            try:
                words = shlex.split(chosen)
            except ValueError as error:  # a quotation that does not end
                raise UsageError(f"variant {text!r}: {error}") from error
            label = (" ".join(words).replace("--", "") or "no change") if not name or "{" in options else name
            found.append((f"{name}: {label}" if name and "{" in options else label, _parse(words, text)))
    return found


def _expanded(text: str) -> list[str]:
    pieces: list[list[str]] = []
    rest = text
    while True:
        begin = rest.find("{")
        end = rest.find("}", begin)
        if begin < 0:
            break
        if end < 0:
            raise UsageError(f"{text!r}: a {{ without its }}")
        pieces += [[rest[:begin]], rest[begin + 1 : end].split(",")]
        rest = rest[end + 1 :]
    pieces.append([rest])
    return ["".join(parts) for parts in product(*pieces)]
