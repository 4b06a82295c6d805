"""Values of options that the benchmarks share."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


def given(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> set[str]:
    """The options that a command line names, also those that are given what is their default."""
    unset = object()
    # What is there before keeps the parser from putting a default in its place.
    found = argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([])), unset))
    return {name for name, value in vars(parser.parse_args(words, found)).items() if value is not unset}


def refuse(why: str) -> NoReturn:
    """Ends a program that could begin nothing."""
    print(why, file=sys.stderr)
    sys.exit(2)


def names(allowed: Any) -> Any:
    """A list of names between commas, each of which is allowed."""

    def parse(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        for name in found:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return found

    return parse


def whole(least: int) -> Any:
    """A whole number that is not less."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} up")
        return value

    return parse


def amount(text: str) -> float:
    """Seconds, minutes, a share: a number from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not (value >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 up")
    return value


def some(text: str) -> float:
    """The same, but not 0."""
    value = amount(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def factor(text: str) -> float:
    """A limit such as 1.02x."""
    try:
        value = float(text.removesuffix("x"))
    except ValueError:
        value = 0
    if not 0.5 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no multiple of peak requested such as 1.02x")
    return value


def factors(text: str) -> list[float]:
    """Limits such as 1.005x,1.01x."""
    return [factor(one) for one in text.split(",")]
