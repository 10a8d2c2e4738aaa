"""What is fuzzed of a model folder: bytes go in; an exception that comes out is a fault of the product.

Each target puts the bytes where a file of a small good folder was and opens that folder: what comes is a
``CheckpointError`` in one line, or tensors.  Where the bytes cannot name other weights, the tensors must be the
right ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import gguf
import numpy as np
import torch
from checkpoint_files import COMMON_KEY, drop_key, edit_metadata, saved, write_hf, write_megatron
from torch import Tensor

from gtp_serve.errors import MAX_TEXT, CheckpointError, GtpServeError, RequestRejected, UsageError
from gtp_serve.loaders import open_checkpoint
from gtp_serve.loaders.chat_template import ChatTemplate, TemplateLimits
from gtp_serve.loaders.pickles import read_pickle
from gtp_serve.loaders.tokenizer import load_tokenizer
from gtp_serve.loaders.tokenizer_files import tokenizer_at

Check = Callable[[bytes], None]
Seeds = dict[str, bytes]

DATA = Path(__file__).parent / "data"
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEMPLATE_LIMITS = TemplateLimits(output_bytes=1 << 16, work=1 << 18, seconds=1.0)


def check_error(error: GtpServeError) -> None:
    """An error is fit to be shown: one line of bounded length, and text that can be sent."""
    assert error.message, type(error)
    assert "\n" not in error.message, error.message
    assert len(error.message) <= MAX_TEXT, len(error.message)
    str(error).encode()


def tensors_at(path: Path) -> dict[str, Tensor] | None:
    """All tensors of a checkpoint; None when it is refused."""
    try:
        checkpoint = open_checkpoint(path)
        try:
            return dict(checkpoint.tensors())
        finally:
            checkpoint.close()
    except CheckpointError as error:
        check_error(error)
        return None


class Files:
    """Small folders, each with one file to be replaced.

    :param root: a folder of their own.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        torch.set_num_threads(1)

    def targets(self) -> dict[str, tuple[Check, Seeds]]:
        """Each target by its name, with inputs to begin from."""
        return {
            "safetensors": self._safetensors(),
            "index": self._index(),
            "config": self._config(),
            "metadata": self._metadata(),
            "common": self._common(),
            "pickle": self._pickle(),
            "gguf": self._gguf(),
            "tokenizer": self._tokenizer("tokenizer.json"),
            "tokenizer_config": self._tokenizer("tokenizer_config.json"),
            "template": (check_template, template_seeds()),
        }

    def _replacing(self, folder: Path, name: str, truth: dict[str, Tensor] | None) -> Check:
        def check(data: bytes) -> None:
            (folder / name).write_bytes(data)
            found = tensors_at(folder)
            if found is not None and truth is not None:
                assert found.keys() == truth.keys()
                assert all(torch.equal(found[key], truth[key]) for key in truth)

        return check

    def _safetensors(self) -> tuple[Check, Seeds]:
        folder = self._root / "safetensors"
        write_hf(folder)
        return self._replacing(folder, "model.safetensors", None), {
            "good": (folder / "model.safetensors").read_bytes(),
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
        }

    def _index(self) -> tuple[Check, Seeds]:
        folder = self._root / "index"
        truth = write_hf(folder, shards=2)
        name = "model.safetensors.index.json"
        return self._replacing(folder, name, truth), {"good": (folder / name).read_bytes()}

    def _config(self) -> tuple[Check, Seeds]:
        folder = self._root / "config"
        write_hf(folder)
        good = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        qwen = {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        seeds = {
            "good": good,
            "yarn": good | {"rope_scaling": yarn},
            "mixtral": good | {"model_type": "mixtral", "num_local_experts": 3},
            "qwen3_moe": good | qwen,
            "qwen2": good | {"model_type": "qwen2", "layer_types": ["full_attention"] * 2, "use_sliding_window": True},
        }
        return self._replacing(folder, "config.json", None), {k: json.dumps(v).encode() for k, v in seeds.items()}

    def _metadata(self) -> tuple[Check, Seeds]:
        folder, _ = write_megatron(self._root / "metadata")
        return self._replacing(folder, ".metadata", None), {"good": (folder / ".metadata").read_bytes()}

    def _common(self) -> tuple[Check, Seeds]:
        folder, _ = write_megatron(self._root / "common")
        good = _common_item(folder)
        edit_metadata(folder, lambda metadata: drop_key(metadata, COMMON_KEY))
        return self._replacing(folder, "common.pt", None), {"good": good, "empty": saved({})}

    def _pickle(self) -> tuple[Check, Seeds]:
        folder, _ = write_megatron(self._root / "pickle")
        seeds = {"metadata": (folder / ".metadata").read_bytes()}
        for number, item in enumerate((b"\x80\x02}q\x00.", b"\x80\x04]\x94(K\x01K\x02e.", b"(i__main__\nx\n.")):
            seeds[f"small{number}"] = item
        return check_pickle, seeds

    def _gguf(self) -> tuple[Check, Seeds]:
        folder = self._root / "gguf"
        folder.mkdir(parents=True)
        good = gguf_bytes(folder / "model.gguf")
        return self._replacing(folder, "model.gguf", None), {"good": good}

    def _tokenizer(self, name: str) -> tuple[Check, Seeds]:
        folder = self._root / name.removesuffix(".json")
        copytree(DATA / "tokenizer", folder, copy_function=_copy)

        def check(data: bytes) -> None:
            (folder / name).write_bytes(data)
            check_tokenizer(folder)

        return check, {"good": (folder / name).read_bytes()}


def _copy(source: str, target: str) -> None:
    Path(target).write_bytes(Path(source).read_bytes())


def _common_item(folder: Path) -> bytes:
    found: list[bytes] = []

    def take(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == COMMON_KEY:
                data = (folder / info.relative_path).read_bytes()
                found.append(data[info.offset : info.offset + info.length])

    edit_metadata(folder, take)
    return found[0]


def check_pickle(data: bytes) -> None:
    """A pickle, with and without persistent ids."""
    for persistent in (False, True):
        try:
            read_pickle(data, "a file", persistent=persistent)
        except CheckpointError as error:
            check_error(error)


def check_tokenizer(folder: Path) -> None:
    """A tokenizer that loads also encodes and decodes."""
    try:
        tokenizer = load_tokenizer(tokenizer_at(folder))
    except CheckpointError as error:
        check_error(error)
        return
    try:
        ids: Sequence[int] = tokenizer.encode("a b\u6f22", add_special_tokens=True)
        tokenizer.render_chat(MESSAGES)
    except (RequestRejected, UsageError) as error:
        check_error(error)
        ids = ()
    assert all(i >= 0 for i in ids)
    tokenizer.decode([*ids, 0, 1, 10**6], skip_special_tokens=False)
    tokenizer.token_bytes(min(3, tokenizer.vocab_size))


def check_template(data: bytes) -> None:
    """A chat template and one conversation."""
    try:
        template = ChatTemplate(data.decode("utf-8", "replace"), limits=TEMPLATE_LIMITS)
        text = template.render(MESSAGES, variables={"tools": None})
    except (UsageError, RequestRejected) as error:
        check_error(error)
        return
    assert len(text.encode("utf-8", "surrogatepass")) <= TEMPLATE_LIMITS.output_bytes


def template_seeds() -> Seeds:
    """Templates from the small tokenizers, and shapes that have made other servers stop."""
    loops = "{% for a in range(3000) %}{% for b in range(3000) %}x{% endfor %}{% endfor %}"
    texts = {
        "nested": loops,
        "times": "{{ 'a' * 100000000 }}",
        "power": "{{ 9 ** 99999 }}",
        "class": "{{ ''.__class__.__mro__ }}",
        "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "format": "{{ '%99999999d' % 1 }}{{ '{:>99999999}'.format(1) }}",
        "filters": "{{ messages|tojson|length }}{{ messages|map(attribute='role')|join(',') }}",
        "space": "{% set n = namespace(a=1) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}",
    }
    found = {name: text.encode() for name, text in texts.items()}
    return found | {f"file{n}": p.read_bytes() for n, p in enumerate(sorted(DATA.glob("tokenizer*/*.jinja")))}


def gguf_bytes(path: Path) -> bytes:
    """A llama of one layer in the smallest sizes that its formats take."""
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {"block_count": 1, "context_length": 8, "embedding_length": 32, "feed_forward_length": 32}
    numbers |= {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 16}
    for name, value in numbers.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_token_list(["a", "b", "c"])
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (3, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32)}
    shapes |= {f"blk.0.ffn_{name}": (32, 32) for name in ("gate", "up", "down")}
    for name, shape in shapes.items():
        values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape) / 64
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()
