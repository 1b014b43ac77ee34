"""Parameter name prefixes, as run configs write them: whole dotted parts of a name.

`layer1` fits `layer1.0.conv1.weight` but not `layer10.weight`.
"""

import difflib
from collections.abc import Iterable, Sequence


def fits(prefix: str, name: str) -> bool:
    """Whether `prefix` is `name` or some of its first dotted parts; a trailing dot in `prefix` is ignored."""
    whole = prefix.rstrip(".")
    return bool(whole) and (name == whole or name.startswith(f"{whole}."))


def longest_fit(prefixes: Iterable[str], names: Iterable[str]) -> str | None:
    """The longest of `prefixes` that fits one of `names`, which are those of a single parameter."""
    found = [prefix for prefix in prefixes if any(fits(prefix, name) for name in names)]
    return max(found, key=lambda prefix: len(prefix.rstrip(".")), default=None)


def no_fit(prefix: str, names: Sequence[str]) -> str:
    """Say that `prefix` fits none of `names`, and which prefixes there are: the end of an error message."""
    parts = prefix.rstrip(".").split(".")
    known = 0
    while known < len(parts) - 1 and any(fits(".".join(parts[: known + 1]), name) for name in names):
        known += 1
    above = "".join(f"{part}." for part in parts[:known])
    below = list(dict.fromkeys(name[len(above) :].split(".")[0] for name in names if name.startswith(above)))
    nearest = difflib.get_close_matches(parts[known], below, n=3)
    if nearest:
        hint = f"did you mean {' or '.join(repr(above + name) for name in nearest)}?"
    else:
        hint = f"there are: {', '.join(above + name for name in below[:12])}{', ...' if len(below) > 12 else ''}."
    return f"no parameter's name begins with {prefix!r} (whole parts between dots); {hint}"
