"""Train a small byte-level transformer, attention forward and backward by cuflash.

The text is Python's own help on its language (`pydoc_data.topics`), or any file::

    python examples/train_tiny.py --plot loss.png
    python examples/train_tiny.py --steps 60 --check

``--check`` trains twice more, on standard attention: once in the same precision, and once in
float64, where rounding is negligible. The two runs in the same precision may differ by no more
than a few times what rounding makes of one of them. It runs on NumPy, or on a GPU with CuPy. The
model is in ``tiny_transformer.py``; plotting needs matplotlib (``pip install 'cuflash[figures]'``).
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from array_module import choose_array_module
from tiny_transformer import (
    Array,
    Attention,
    Config,
    Parameters,
    dense_attention,
    initial_parameters,
    loss_and_gradients,
)

import cuflash

_BATCH = 8
_RATE = 3e-3
_WARM_UP = 20  # steps
_BETAS = (0.9, 0.98)
# Times the difference that rounding makes: two runs of one precision each have their own.
_ALLOWED = 4.0


def text_bytes(path: Path | None) -> np.ndarray[Any, Any]:
    """The text to learn, as bytes."""
    if path is None:
        topics = pydoc_data.topics.topics
        content = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        content = path.read_bytes()
    return np.frombuffer(content, np.uint8)


@dataclass(frozen=True)
class Run:
    """What a run of training is made of; runs with the same steps and seed see the same text."""

    config: Config
    steps: int
    seed: int
    dtype: Any  # of weights and all but attention
    attention: Attention
    xp: Any


def train(
    run: Run, text: np.ndarray[Any, Any], report: Callable[[int, float], None] | None = None
) -> np.ndarray[Any, Any]:
    """The loss at each step, before the step is taken."""
    xp, config = run.xp, run.config
    if len(text) <= config.context:
        raise ValueError(f"the text has {len(text)} bytes; expected more than {config.context}")
    rng = np.random.default_rng(run.seed)
    parameters = {
        name: xp.asarray(array.astype(run.dtype))
        for name, array in initial_parameters(config, rng, np.float64).items()
    }
    optimizer = Adam(parameters, xp)
    losses = np.zeros(run.steps)
    for step in range(run.steps):
        starts = rng.integers(0, len(text) - config.context, _BATCH)
        tokens = text[starts[:, None] + np.arange(config.context + 1)].astype(np.int64)
        loss, gradients = loss_and_gradients(
            parameters, xp.asarray(tokens), config, run.attention, xp
        )
        losses[step] = float(loss)
        if report is not None:
            report(step, losses[step])
        optimizer.step(gradients, _RATE * rate_at(step, run.steps))
    return losses


def rate_at(step: int, steps: int) -> float:
    """Share of the learning rate: a linear start, then half a cosine down to a tenth."""
    done = step / max(steps, 1)
    return min((step + 1) / _WARM_UP, 1.0) * (0.55 + 0.45 * float(np.cos(np.pi * done)))


class Adam:
    """Kingma and Ba (2015), algorithm 1; updates the parameters in place."""

    def __init__(self, parameters: Parameters, xp: Any) -> None:
        self._parameters, self._xp = parameters, xp
        self._means = {name: xp.zeros_like(array) for name, array in parameters.items()}
        self._squares = {name: xp.zeros_like(array) for name, array in parameters.items()}
        self._count = 0

    def step(self, gradients: Parameters, rate: float) -> None:
        """Move against the gradients."""
        self._count += 1
        first, second = (1 - beta**self._count for beta in _BETAS)
        for name, gradient in gradients.items():
            mean, square = self._means[name], self._squares[name]
            mean += (1 - _BETAS[0]) * (gradient - mean)
            square += (1 - _BETAS[1]) * (gradient * gradient - square)
            self._parameters[name] -= (
                rate * (mean / first) / (self._xp.sqrt(square / second) + 1e-8)
            )


# --- attention ------------------------------------------------------------------------------------


def by_cuflash(kernel: str) -> Attention:
    """Attention of (batch, seq, heads, dim) by cuflash."""
    return lambda q, k, v: cuflash.attention_vjp(q, k, v, causal=True, layout="bshd", kernel=kernel)


def by_standard(xp: Any) -> Attention:
    """The same the standard way, in the precision that it is given."""
    return lambda q, k, v: dense_attention(q, k, v, xp)


def rounded(attention: Attention, dtype: Any, computed_in: Any = None) -> Attention:
    """Attention with inputs and results rounded to `dtype`, which it is given as `computed_in`."""

    def call(q: Array, k: Array, v: Array) -> Any:
        outer = q.dtype

        def inward(array: Array) -> Array:
            array = array.astype(dtype, copy=False)
            return array if computed_in is None else array.astype(computed_in, copy=False)

        def outward(array: Array) -> Array:
            return array.astype(dtype, copy=False).astype(outer, copy=False)

        out, vjp = attention(inward(q), inward(k), inward(v))
        return outward(out), lambda dout: tuple(map(outward, vjp(inward(dout))))

    return call


# --- the check, and the figure --------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Losses by cuflash, by standard attention, and by standard attention in float64."""

    cuflash: np.ndarray[Any, Any]
    standard: np.ndarray[Any, Any]
    exact: np.ndarray[Any, Any]

    @property
    def rounding(self) -> float:
        """The largest difference that rounding makes of the standard run."""
        return float(np.abs(self.standard - self.exact).max())

    @property
    def difference(self) -> float:
        """The largest difference between the two attentions in one precision."""
        return float(np.abs(self.cuflash - self.standard).max())

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= _ALLOWED * self.rounding

    def __str__(self) -> str:
        return (
            f"loss after {len(self.exact)} steps: cuflash {self.cuflash[-1]:.7f}, standard "
            f"{self.standard[-1]:.7f}, standard in float64 {self.exact[-1]:.7f}\n"
            f"largest difference at any step: {self.difference:.2e}; rounding of the standard run "
            f"{self.rounding:.2e}; allowed {_ALLOWED:g} times that: "
            f"{'agrees' if self.agrees else 'DIFFERS'}"
        )


def plot(path: Path, curves: dict[str, np.ndarray[Any, Any]]) -> None:
    """Draw loss curves into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, losses), style in zip(curves.items(), ("-", "--", ":"), strict=False):
        axes.plot(np.arange(1, len(losses) + 1), losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss in nats a byte", title="A byte-level transformer")
    axes.legend()
    figure.savefig(path, dpi=150)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ``None`` stands for that of the process."""
    parser = argparse.ArgumentParser(
        description="Train a small byte-level transformer, attention by cuflash in both passes."
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="what to learn")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="default 200")
    parser.add_argument("--layers", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        help="of attention's arrays (default: float32 on the CPU, float16 on a GPU)",
    )
    parser.add_argument("--kernel", default="auto", help="passed to cuflash (default auto)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss curve")
    parser.add_argument(
        "--check",
        action="store_true",
        help="also train on standard attention; exit 1 if rounding can't explain the difference",
    )
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps: got {options.steps}; expected 1 or more")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parse_arguments(arguments)
    try:
        xp, reason = choose_array_module(options.device)
        text = text_bytes(options.text)
    except (OSError, RuntimeError) as error:
        print(f"train_tiny.py: {error}", file=sys.stderr)
        return 2
    on_gpu = xp is not np
    dtype = np.dtype(options.dtype or ("float16" if on_gpu else "float32"))
    print(f"device: {'gpu' if on_gpu else 'cpu'} ({xp.__name__}): {reason}", file=sys.stderr)
    print(f"{len(text)} bytes of text, attention in {dtype}", file=sys.stderr)

    def run_of(attention: Attention, weights: Any) -> Run:
        config = Config(layers=options.layers)
        return Run(config, options.steps, options.seed, weights, attention, xp)

    def report(step: int, loss: float) -> None:
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step + 1:5}  loss {loss:.4f}", flush=True)

    started = time.perf_counter()
    losses = train(run_of(rounded(by_cuflash(options.kernel), dtype), np.float32), text, report)
    print(f"{options.steps} steps in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    curves, status = {"cuflash": losses}, 0
    if options.check:
        same = rounded(by_standard(xp), dtype, computed_in=np.float32)
        compared = Comparison(
            losses,
            train(run_of(same, np.float32), text),
            train(run_of(by_standard(xp), np.float64), text),
        )
        print(compared)
        curves |= {"standard attention": compared.standard}
        status = 0 if compared.agrees else 1
    if options.plot:
        plot(options.plot, curves)
    return status


if __name__ == "__main__":
    sys.exit(main())
