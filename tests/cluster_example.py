"""The Ray Serve application that is delivered, as somebody would use it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from cluster_world import PATIENCE, Front

from gtp_serve.refit import Publisher

ROOT = Path(__file__).parents[1]


def example(folder: Path, ckpt: Path, port: int) -> tuple[Path, Path]:
    """The application that is delivered, with this test's paths and sizes, and the key that it names."""
    key = folder / "key"
    key.write_text("key-of-this-test\n")
    key.chmod(0o600)
    file = folder / "serve.yaml"
    text = (ROOT / "deploy" / "ray-serve.yaml").read_text()
    for old, new in {
        "/etc/gtp-serve/admin-key": str(key),
        "/shared/ckpts/my-run": str(ckpt),
        "port: 8000": f"port: {port}",
        "tp: 2": "fleet: served\n      tp: 1\n      no_tokenizer: true\n      device: cpu\n      kv_memory: 8MiB",
        "max_replicas: 8": "max_replicas: 2",
    }.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    return file, key


def serves(port: int, key: Path, weights: Mapping[str, torch.Tensor]) -> Front:
    """The application is up, keeps strangers from the weights, and takes new ones."""
    front = Front.at(f"http://127.0.0.1:{port}")
    front.key = key.read_text().strip()
    front.until(lambda body: [one["state"] for one in body["replicas"]] == ["ready", "ready"], 3 * PATIENCE)
    before = front.generate([3, 7, 11])
    assert before["meta_info"]["weight_version"] == "0"
    stranger = Front.at(front.url)
    assert stranger.call("POST", "/weights/updates", {"version": "1"})[0] == 401  # the file names a key
    Publisher(front.url, key=front.key, transport="http").push(weights, "1")
    after = front.generate([3, 7, 11])
    assert after["meta_info"]["weight_version"] == "1"
    assert after["output_ids"] != before["output_ids"]
    return front
