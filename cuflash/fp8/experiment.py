"""Measures the numerical error of 8-bit attention on random inputs and on those of real models.

An experiment is a list of tasks. A task makes its inputs, rounds them to float16, computes float64
attention, and measures any number of recipes against that: `plan_random` and `plan_layers` make
tasks, `run` yields records. The setting is that of FlashAttention-3 (Shah et al. 2024, section 3.3
and its table of numerical error).

Since rows of attention are independent, few of them, spread over the sequence, tell the error of
all: with 128 query rows for each head, 16,384 keys are affordable. What a recipe takes from q as a
whole (a scale per head, say) then comes from those rows.

>>> tasks = plan_random(Shape(heads=1, keys=512, dim=64), [0], None, ["f8", "i8"], ["normal"])
>>> f8, i8 = run(tasks)
>>> i8.relative_l2 < f8.relative_l2 < 0.06
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .distributions import named
from .problems import (
    LayerSource,
    Problem,
    RandomSource,
    Shape,
    Source,
    exact_attention,
    layers_of,
)
from .records import Record, errors
from .sweeps import NamedRecipe, Setting, Sweep, parse_recipe

__all__ = [
    "LayerSource",
    "Measurement",
    "Problem",
    "RandomSource",
    "Shape",
    "Source",
    "Task",
    "exact_attention",
    "layers_of",
    "plan_layers",
    "plan_random",
    "run",
]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A recipe to be measured, with what the sweep set."""

    recipe: NamedRecipe
    setting: str = ""
    x: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """Measurements that share their inputs."""

    sweep: str
    source: Source
    shape: Shape
    seed: int
    measurements: tuple[Measurement, ...]

    def run(self) -> Iterator[Record]:
        """Make the inputs, and yield a record for each measurement."""
        problem = self.source.problem(self.shape, self.seed)
        heads, rows, dim = problem.q.shape
        size = float(np.sqrt(np.mean(problem.exact**2)))
        for measurement in self.measurements:
            got = problem.attend(measurement.recipe)
            found = errors(got, problem.exact)
            unrounded = problem.exact_unrounded
            yield Record(
                sweep=self.sweep,
                recipe=measurement.recipe.label,
                inputs=self.source.name,
                setting=measurement.setting,
                x=measurement.x,
                heads=heads,
                rows=rows,
                keys=problem.k.shape[1],
                dim=dim,
                causal=self.shape.causal,
                seed=self.seed,
                rmse=found.rmse,
                relative_l2=found.relative_l2,
                max_error=found.max_error,
                cosine=found.cosine,
                rmse_unrounded=None if unrounded is None else errors(got, unrounded).rmse,
                size=size,
            )


def plan_random(
    shape: Shape,
    seeds: Sequence[int],
    sweep: Sweep | None = None,
    recipes: Sequence[str] = (),
    distributions: Sequence[str] = (),
) -> list[Task]:
    """Tasks on random inputs.

    Parameters
    ----------
    shape : Shape
        A sweep over shapes replaces part of it.
    seeds : sequence of int
        Each is a set of inputs, which all recipes and settings share.
    sweep : Sweep, optional
        Without one, every recipe meets every distribution.
    recipes : sequence of str
        As `parse_recipe` reads them; those of the sweep where none is given.
    distributions : sequence of str
        Names; those of the sweep where none is given.

    Raises
    ------
    ValueError
        For an unknown name, for distributions given to a sweep that brings its own, or where
        neither a sweep nor the caller names any.
    """
    if sweep is not None and sweep.about_inputs and distributions:
        raise ValueError(
            f"distribution: got {', '.join(distributions)}; expected none, for the sweep "
            f"{sweep.name!r} brings its own"
        )
    parsed = _parsed(recipes, sweep)
    settings = (Setting(""),) if sweep is None else sweep.settings
    name = "" if sweep is None else sweep.name
    if sweep is not None and sweep.about_inputs:
        return [
            Task(
                name,
                RandomSource(setting.distribution, sweep.distributions[0]),
                shape,
                seed,
                _measure(parsed, [setting]),
            )
            for setting in settings
            for seed in seeds
            if setting.distribution is not None
        ]
    wanted = distributions or (() if sweep is None else sweep.distributions)
    if not wanted:
        raise ValueError("distribution: none given; expected at least one")
    sources = [RandomSource(named(one), one) for one in wanted]
    return _tasks(name, sources, shape, seeds, parsed, settings)


def plan_layers(
    layers: Sequence[LayerSource],
    shape: Shape,
    seeds: Sequence[int],
    sweep: Sweep | None = None,
    recipes: Sequence[str] = (),
) -> list[Task]:
    """Tasks on the layers of a file, as `layers_of` finds them.

    Parameters
    ----------
    layers : sequence of LayerSource
    shape : Shape
        `rows` and `causal` count.
    seeds : sequence of int
        Each is a sample of rows.
    sweep : Sweep, optional
        One that changes nothing but recipes.
    recipes : sequence of str
        As `parse_recipe` reads them; those of the sweep where none is given.

    Raises
    ------
    ValueError
        For an unknown name, or a sweep over inputs or shapes, which a file has settled.
    """
    if sweep is not None and (sweep.about_inputs or sweep.about_shapes):
        raise ValueError(
            f"sweep: got {sweep.name!r}, which brings its own "
            f"{'inputs' if sweep.about_inputs else 'shapes'}; expected one about recipes for the "
            "inputs of a file"
        )
    settings = (Setting(""),) if sweep is None else sweep.settings
    name = "" if sweep is None else sweep.name
    return _tasks(name, layers, shape, seeds, _parsed(recipes, sweep), settings)


def run(tasks: Sequence[Task]) -> Iterator[Record]:
    """Run tasks one after another; records come as soon as they are measured."""
    for task in tasks:
        yield from task.run()


def _parsed(recipes: Sequence[str], sweep: Sweep | None) -> list[NamedRecipe]:
    texts = recipes or (() if sweep is None else sweep.recipes)
    if not texts:
        raise ValueError("recipe: none given; expected at least one")
    return [parse_recipe(text) for text in texts]


def _measure(
    recipes: Sequence[NamedRecipe], settings: Sequence[Setting]
) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(recipe.with_fields(setting.recipe), setting.label, setting.x)
        for setting in settings
        for recipe in recipes
    )


def _tasks(
    sweep: str,
    sources: Sequence[Source],
    shape: Shape,
    seeds: Sequence[int],
    recipes: Sequence[NamedRecipe],
    settings: Sequence[Setting],
) -> list[Task]:
    """Settings that change nothing but recipes share their inputs."""
    groups: dict[Shape, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(dataclasses.replace(shape, **setting.shape), []).append(setting)
    return [
        Task(sweep, source, used, seed, _measure(recipes, group))
        for source in sources
        for used, group in groups.items()
        for seed in seeds
    ]
