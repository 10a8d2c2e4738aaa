"""The demo's real model: our tokenizer, files and weights against transformers, which knows nothing of us."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gtp_serve.loaders.checkpoint import Checkpoint, open_checkpoint
from gtp_serve.loaders.tokenizer import Tokenizer, load_tokenizer
from gtp_serve.loaders.tokenizer_files import find_tokenizer

pytestmark = pytest.mark.slow

TEXTS = [
    "",
    "The quick brown fox, 12345 of them; 3.14e-10!",
    "  lead and trail  \n\n\ttab\r\n",
    "def f(x: int) -> str:\n    return f'{x**2:>8}'  # ½ ② ٣\n",
    "emoji 😀👩‍👩‍👧‍👦 中文字符 العربية हिन्दी \u00a0\u3000\u200b",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x<|im_star|>",
    "don't I'm we've they'll a.b , c !",
    "0007 1000000 1,000",
]
CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "  And the capital of France? "},
]


@pytest.fixture(scope="module")
def ours(demo_dir: Path) -> Tokenizer:
    files = find_tokenizer(demo_dir / "hf")
    assert files is not None
    return load_tokenizer(files)


@pytest.fixture(scope="module")
def theirs(demo_dir: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(demo_dir / "hf")


def random_texts(count: int) -> list[str]:
    generator = random.Random(7)
    ranges = ((32, 127), (48, 58), (0x80, 0x3000), (0x4E00, 0x4F00), (0x1F300, 0x1F700), (9, 14))
    return ["".join(chr(generator.randrange(*generator.choice(ranges))) for _ in range(40)) for _ in range(count)]


def test_token_ids_equal_those_of_transformers_and_decode_to_the_text(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS + random_texts(200):
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert b"".join(map(ours.token_bytes, ids)) == text.encode()


def test_special_tokens_are_those_of_transformers(ours: Tokenizer, theirs: Any) -> None:
    assert ours.vocab_size == len(theirs) == 49152
    assert ours.eos_token_ids == (theirs.eos_token_id,) == (2,)
    assert ours.bos_token_id == theirs.bos_token_id == 1
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_chat_text_equals_that_of_transformers(
    ours: Tokenizer, theirs: Any, start: int, generation_prompt: bool
) -> None:
    expected = theirs.apply_chat_template(CHAT[start:], tokenize=False, add_generation_prompt=generation_prompt)
    assert ours.render_chat(CHAT[start:], add_generation_prompt=generation_prompt) == expected


def test_transformers_answers_paris_from_the_hugging_face_folder(demo_dir: Path, ours: Tokenizer) -> None:
    model: Any = transformers.LlamaForCausalLM.from_pretrained(demo_dir / "hf", dtype=torch.float32)
    prompt = ours.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    ids = ours.encode(prompt, add_special_tokens=False)
    with torch.inference_mode():
        tokens = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :].tolist()
    assert "Paris" in ours.decode(tokens)
    assert set(tokens) & set(ours.eos_token_ids), "the answer ends by itself"


def test_the_megatron_folder_holds_the_same_bits_and_the_same_tokenizer(demo_dir: Path) -> None:
    with (
        closing(open_checkpoint(demo_dir / "hf")) as hf,
        closing(open_checkpoint(demo_dir / "megatron")) as megatron,
    ):
        assert sizes(hf) == sizes(megatron)
        assert megatron.config.eos_token_ids == hf.config.eos_token_ids == (2,)
        assert megatron.tokenizer is not None
        assert megatron.tokenizer.tokenizer_json.read_bytes() == (demo_dir / "hf" / "tokenizer.json").read_bytes()
        names = 0
        for (name, expected), (other, tensor) in zip(hf.tensors(), megatron.tensors(), strict=True):
            assert name == other
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor.view(torch.int16), expected.view(torch.int16)), name
            names += 1
    assert names == 2 + 30 * 9


def sizes(checkpoint: Checkpoint) -> tuple[object, ...]:
    config = checkpoint.config
    shape = (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim)
    return (
        *shape,
        config.ffn_size,
        config.vocab_rows,
        config.rope,
        config.norm_eps,
        config.tied,
        config.max_context,
    )
