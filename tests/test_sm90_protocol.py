"""The warps of sm90 wait for each other as they should, in whatever order they come."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from sm90_block import Config, Fault
from sm90_protocol import trial

BOTH = (False, True)
SIXTEEN = [
    Config(groups, stages, 1, ping_pong, False, skips, lengths=True)
    for groups, stages in ((2, 2), (3, 2), (2, 3))
    for ping_pong, skips in itertools.product(BOTH, repeat=2)
]
SIXTEEN += [Config(2, 2, 2, *flags) for flags in itertools.product(BOTH, repeat=2)]
SIXTEEN += [
    Config(2, 2, 1, ping_pong, True, skips, lengths)
    for ping_pong, skips, lengths in itertools.product(BOTH, repeat=3)
]
EIGHT = [
    Config(groups, stages, skips=skips, eight=True, first=first)
    for groups, stages in ((2, 4), (3, 4), (4, 4), (2, 2))
    for skips, first in itertools.product(BOTH, repeat=2)
]
TRIALS = 60


def names(config: Config) -> str:
    bits = "8" if config.eight else "16"
    flags = ("ping_pong", "out_in_place", "skips", "lengths", "first")
    chosen = [flag for flag in flags if getattr(config, flag)]
    return "-".join([f"{bits}:{config.groups}x{config.stages}x{config.cluster}", *chosen])


@pytest.mark.parametrize("config", SIXTEEN + EIGHT, ids=names)
def test_nothing_is_overwritten_and_nobody_waits_for_ever(config: Config) -> None:
    for seed in range(TRIALS):
        trial(config, seed)


MISTAKES = {
    "values are released too early": (Config(), "V .*: written"),
    "values are cleared after tiles that are passed": (
        Config(skips=True, lengths=True),
        "wait for ever|V .*: expected",
    ),
    "warps that pass do not meet": (Config(skips=True), "wait for ever"),
    "out is written before its last store has read": (Config(), "out .*: (written|expected)"),
    "queries are released before warps have met": (Config(), "wait for ever"),
    "out takes the place of values that others read": (
        Config(ping_pong=True, out_in_place=True),
        "V .*: written",
    ),
    "the place of out is given back before its store has read": (
        Config(out_in_place=True),
        "V .*: written",
    ),
    "a single tile does not wait for the other place": (
        Config(out_in_place=True),
        "wait for ever|V .*: (written|expected)",
    ),
    "values are awaited before the place of out is given back": (
        Config(out_in_place=True, skips=True),
        "wait for ever",
    ),
    "first values are left by those who need none": (
        Config(stages=4, skips=True, eight=True, first=True),
        "wait for ever",
    ),
}


@pytest.mark.parametrize("mutation", MISTAKES)
def test_mistakes_are_found(mutation: str) -> None:
    """Each was made once, or would have been: trials like those above have to see it."""
    config, message = MISTAKES[mutation]
    wrong = dataclasses.replace(config, mutation=mutation)

    def try_often() -> None:
        for seed in range(20 * TRIALS):
            trial(wrong, seed)

    with pytest.raises(Fault, match=message):
        try_often()
