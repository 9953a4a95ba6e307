"""What the 8-bit experiment varies: sweeps as data, and recipes written as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .baselines import BASELINES
from .distributions import ChannelMeans, Distribution, KeyChannels, Mixture, Sink
from .recipe import PRESETS, Fp8Recipe


@dataclass(frozen=True, slots=True)
class Published:
    """A line of the published ablation: what it is called here, and its RMSE in the unit of V."""

    name: str
    rmse: float


PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {
        "fp16-standard": Published("FP16 standard", 3.2e-4),
        "fp16": Published("FP16 tiled", 1.9e-4),
        "per_tensor": Published("FP8 per tensor", 2.4e-2),
        "fa3": Published("FP8 block + rotation", 9.1e-3),
        "fa3:rotation=none": Published("FP8 block only", 2.4e-2),
        "per_tensor:rotation=hadamard": Published("FP8 rotation only", 9.3e-3),
    }
)
"""By recipe, the RMSE that FlashAttention-3 (Shah et al. 2024) gives in its table of numerical
error, for N(0, 1) + N(0, 100) · Bernoulli(0.001): baseline FP16, FlashAttention-2 and -3 in FP16,
baseline FP8, FlashAttention-3 in FP8, the same without incoherent processing, and without block
quantisation.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of what a sweep varies.

    Attributes
    ----------
    label : str
        The value in words.
    x : float or None
        As a number, for an axis.
    recipe : mapping of str to value
        Fields of `Fp8Recipe` that it replaces.
    shape : mapping of str to value
        Fields of `Shape` that it replaces.
    distribution : Distribution or None
        The inputs, where the sweep is about these.
    """

    label: str
    x: float | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)
    distribution: Distribution | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """Settings, and what they are tried with unless the caller says otherwise.

    Attributes
    ----------
    name, summary : str
        As on the command line.
    recipes : tuple of str
        As `parse_recipe` reads them.
    distributions : tuple of str
        Their names; where the settings bring their own, what these are called together.
    settings : tuple of Setting
    """

    name: str
    summary: str
    recipes: tuple[str, ...]
    distributions: tuple[str, ...]
    settings: tuple[Setting, ...] = (Setting(""),)

    @property
    def about_inputs(self) -> bool:
        """Whether the settings bring their own inputs."""
        return self.settings[0].distribution is not None

    @property
    def about_shapes(self) -> bool:
        """Whether the settings bring their own shapes."""
        return bool(self.settings[0].shape)

    @property
    def about_recipes(self) -> bool:
        """Whether the settings change the recipes."""
        return any(setting.recipe for setting in self.settings)


def _recipe(label: str, x: float | None = None, **fields: Any) -> Setting:
    return Setting(label, x, recipe=fields)


def _inputs(x: float, distribution: Distribution) -> Setting:
    return Setting(f"{x:g}", x, distribution=distribution)


def _shape(**fields: int) -> Setting:
    (value,) = fields.values()
    return Setting(str(value), float(value), shape=fields)


LIMITS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "f8+": {
            "paper": 0.052,
            "normal": 0.052,
            "chanK": 0.052,
            "chanQKV": 0.068,
            "kmean": 0.0009,
            "qkmean": 0.008,
            "token": 0.14,
            "tokenV": 0.052,
            "t3": 0.054,
            "sink8": 0.066,
            "sink12": 0.065,
        },
        "i8+": {
            "paper": 0.031,
            "normal": 0.035,
            "chanK": 0.035,
            "chanQKV": 0.039,
            "kmean": 0.0006,
            "qkmean": 0.0033,
            "token": 0.045,
            "tokenV": 0.035,
            "t3": 0.032,
            "sink8": 0.038,
            "sink12": 0.015,
        },
    }
)
"""By recipe and distribution, the relative L2 error that the sweep ``limits`` must not exceed: what
rounding causes at 4,096 keys, dim 128, full, and some 10 % for the sample. More means a bug.
"""


_BLOCKS: tuple[int | str, ...] = ("token", 32, 64, 128, 256, "head", "tensor")
_OUTLIER_RECIPES = (
    "per_tensor",
    "per_tensor:rotation=hadamard",
    "fa3",
    "f8:rotation=none",
    "f8",
    "i8",
)

SWEEPS: Mapping[str, Sweep] = MappingProxyType(
    {
        sweep.name: sweep
        for sweep in (
            Sweep(
                "ablation",
                "the published ablation of FlashAttention-3, and the recipes here",
                (*PUBLISHED, "f8", "i8"),
                ("paper",),
            ),
            Sweep(
                "limits",
                "errors beside the largest that rounding explains",
                tuple(LIMITS),
                tuple(LIMITS["f8+"]),
                (Setting("", shape={"heads": 8, "keys": 4096, "dim": 128, "rows": 1024}),),
            ),
            Sweep(
                "rotation",
                "kinds of rotation of q and k",
                ("f8",),
                ("paper", "normal", "chanK"),
                (
                    _recipe("none", rotation=None),
                    _recipe("no signs", rotation="hadamard", seed=None),
                    _recipe("signs", rotation="hadamard", seed=0),
                    _recipe("other signs", rotation="hadamard", seed=1),
                    _recipe("signs per head", rotation="hadamard", rotation_per_head=True),
                    _recipe("orthogonal", rotation="orthogonal"),
                    _recipe("blocks of 64", rotation="hadamard", rotation_block=64),
                    _recipe("blocks of 32", rotation="hadamard", rotation_block=32),
                    _recipe("blocks of 16", rotation="hadamard", rotation_block=16),
                ),
            ),
            Sweep(
                "block",
                "size of the blocks of q and k that share a scale",
                ("f8", "i8"),
                ("normal", "paper", "token"),
                tuple(_recipe(str(b), q_block=b, k_block=b) for b in _BLOCKS),
            ),
            Sweep(
                "balance",
                "balancing of the channels of q and k",
                ("f8", "i8"),
                ("paper", "normal", "chanK", "chanQKV"),
                (_recipe("off", balance=False), _recipe("on", balance=True)),
            ),
            Sweep(
                "centring",
                "means taken from k and v",
                ("f8", "i8"),
                ("normal", "kmean", "qkmean", "sink8"),
                (
                    _recipe("none", center_k=False, center_v=False, residual_mean=False),
                    _recipe("K", center_k=True, center_v=False, residual_mean=False),
                    _recipe("V", center_k=False, center_v=True, residual_mean=False),
                    _recipe("K, V", center_k=True, center_v=True, residual_mean=False),
                    _recipe("K, V, residual", center_k=True, center_v=True, residual_mean=True),
                ),
            ),
            Sweep(
                "accumulation",
                "how P V is summed, with and without V centred",
                ("f8",),
                ("normal", "kmean"),
                tuple(
                    _recipe(
                        f"{accumulate}{'' if centred else ', V as is'}",
                        accumulate=accumulate,
                        center_v=centred,
                        residual_mean=centred,
                    )
                    for centred in (True, False)
                    for accumulate in ("fp32", "two_level", "single")
                ),
            ),
            Sweep(
                "p-scale",
                "size of the weights before rounding, and what they are relative to",
                ("f8",),
                ("normal", "sink8", "sink12"),
                tuple(
                    _recipe(f"{scale:g}, {reference}", p_scale=scale, reference=reference)
                    for reference in ("running", "tile")
                    for scale in (1.0, 16.0, 256.0, 448.0)
                ),
            ),
            Sweep(
                "outlier",
                "standard deviation of the outliers, of probability 0.001",
                _OUTLIER_RECIPES,
                ("paper",),
                tuple(_inputs(x, Mixture(outlier_std=x)) for x in (0.0, 3.0, 10.0, 30.0, 100.0)),
            ),
            Sweep(
                "probability",
                "probability of an outlier, of standard deviation 10",
                _OUTLIER_RECIPES,
                ("paper",),
                tuple(_inputs(x, Mixture(probability=x)) for x in (1e-4, 1e-3, 1e-2)),
            ),
            Sweep(
                "channel",
                "size of the largest channel of k",
                ("per_tensor", "fa3", "f8:balance=false", "f8:rotation=none", "f8", "i8"),
                ("chanK",),
                tuple(_inputs(x, KeyChannels(x)) for x in (1.0, 3.0, 10.0, 30.0, 100.0)),
            ),
            Sweep(
                "kmean",
                "spread of the channel means of k",
                ("per_tensor", "fa3", "f8:center_k=false", "f8", "i8"),
                ("qkmean",),
                tuple(
                    _inputs(x, ChannelMeans(k_mean_std=x, v_mean_std=0.0, q_mean_std=2.0))
                    for x in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
                ),
            ),
            Sweep(
                "sink",
                "score of an attention sink",
                (
                    "fa3",
                    "f8:p_scale=1:reference=running",
                    "f8:p_scale=256:reference=running",
                    "f8",
                    "f8+",
                    "i8+",
                ),
                ("sink",),
                tuple(_inputs(x, Sink(x)) for x in (0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0)),
            ),
            Sweep(
                "length",
                "number of keys",
                ("fp16", "per_tensor", "fa3", "f8", "i8"),
                ("paper", "normal"),
                tuple(_shape(keys=1 << power) for power in range(9, 15)),
            ),
            Sweep(
                "dim",
                "head dim",
                ("fp16", "per_tensor", "fa3", "f8", "i8"),
                ("paper", "normal"),
                tuple(_shape(dim=dim) for dim in (64, 128, 256)),
            ),
        )
    }
)
"""All sweeps, by name."""


@dataclass(frozen=True, slots=True)
class NamedRecipe:
    """A recipe, or the name of a 16-bit baseline, and the text that it was read from."""

    label: str
    recipe: Fp8Recipe | str

    def with_fields(self, fields: Mapping[str, Any]) -> NamedRecipe:
        """The same with some fields replaced; a baseline has none, and stays."""
        if not fields or isinstance(self.recipe, str):
            return self
        return NamedRecipe(self.label, dataclasses.replace(self.recipe, **fields))


def parse_recipe(text: str) -> NamedRecipe:
    """Read a recipe: ``fp16``, ``f8``, or a preset with fields replaced, ``f8:rotation=none``.

    Parameters
    ----------
    text : str
        The name of a preset or of a baseline; after a preset any number of ``:field=value``, with
        none, true, false, a number or a word for the value.

    Raises
    ------
    ValueError
        For an unknown name or field, or a value that the field does not take.
    """
    name, *changes = text.split(":")
    if name in BASELINES and not changes:
        return NamedRecipe(text, name)
    if name not in PRESETS:
        raise ValueError(
            f"recipe: got {text!r}; expected one of {', '.join((*PRESETS, *BASELINES))}, "
            "the first of these also as NAME:FIELD=VALUE"
        )
    known = [each.name for each in dataclasses.fields(Fp8Recipe)]
    fields = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if key not in known or not equals:
            raise ValueError(
                f"recipe: got {text!r}; expected after a colon FIELD=VALUE, with a field of "
                f"{', '.join(known)}"
            )
        fields[key] = _field_value(value)
    try:
        return NamedRecipe(text, dataclasses.replace(PRESETS[name], **fields))
    except (ValueError, TypeError) as error:
        raise ValueError(f"recipe: got {text!r}; {error}") from None


def _field_value(text: str) -> Any:
    constants = {"none": None, "true": True, "false": False}
    if text.lower() in constants:
        return constants[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
