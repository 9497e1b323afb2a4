"""Reads the ``-O key=value`` pairs that plugins take. Does no conversion."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prism_sdk.errors import UsageError


def check_known(options: Mapping[str, str], known: Collection[str], *, of: str) -> None:
    """Refuse options that ``of`` does not have; a name that ends in ``.`` stands for all that begin with it."""
    prefixes = tuple(name for name in known if name.endswith("."))
    for name in options:
        if name not in known and not (prefixes and name.startswith(prefixes)):
            raise UsageError(f"{of} has no option {name!r}", hint=f"its options are {', '.join(sorted(known))}")


def flag(options: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    """A yes-or-no option."""
    text = options.get(name)
    if text is None:
        return default
    if text.lower() in ("true", "yes", "1", "on"):
        return True
    if text.lower() in ("false", "no", "0", "off"):
        return False
    raise UsageError(f"-O {name}={text} is not true or false")


def choice(options: Mapping[str, str], name: str, allowed: Collection[str], *, default: str) -> str:
    """An option with a fixed set of values."""
    text = options.get(name, default)
    if text not in allowed:
        raise UsageError(f"-O {name}={text} is not known", hint=f"it is one of {', '.join(allowed)}")
    return text


def integer(options: Mapping[str, str], name: str, *, default: int | None, low: int, high: int) -> int | None:
    """A whole number in a range."""
    return default if name not in options else _integer(options[name], name, low=low, high=high)


def at_least(options: Mapping[str, str], name: str, *, default: int, low: int) -> int:
    """A whole number with a lower limit."""
    return default if name not in options else _integer(options[name], name, low=low, high=None)


def _integer(text: str, name: str, *, low: int, high: int | None) -> int:
    try:
        value = int(text)
    except ValueError:  # also of thousands of digits
        raise UsageError(f"-O {name}={text[:40]} is not a whole number") from None
    if value < low and high is None:
        raise UsageError(f"-O {name}={text} is too small: it is at least {low}")
    if value < low or (high is not None and value > high):
        raise UsageError(f"-O {name}={text} is not in {low} .. {high}")
    return value


def ranks_of(options: Mapping[str, str], present: Collection[int]) -> list[int]:
    """The ranks that ``-O ranks=0-3,8`` selects among those ``present``, ascending; all of them without it."""
    text = options.get("ranks")
    if text is None:
        return sorted(present)
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"-O ranks={text} is not a list of ranks", hint="write it as in ranks=0-3,8")
        low, high = int(first), int(last) if dash else int(first)
        chosen.update(rank for rank in present if low <= rank <= high)
    if not chosen:
        raise UsageError(f"-O ranks={text} selects no rank that has data")
    return sorted(chosen)


def steps_of(options: Mapping[str, str]) -> range | None:
    """The steps that ``-O steps=A:B`` selects, B exclusive; one step when it is a number."""
    text = options.get("steps")
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        chosen = range(int(first), int(last)) if colon else range(int(first), int(first) + 1)
    except ValueError:
        raise UsageError(f"-O steps={text} is not a range of steps", hint="write it as in steps=2:5") from None
    if not chosen:
        raise UsageError(f"-O steps={text} is empty: the end is exclusive")
    return chosen
