"""Serves, in a network namespace of its own with nothing but the loopback interface, and uses what is served.

``unshare -rn python cut_off.py CKPT TOKENIZER``; prints one JSON object.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
from typing import Any

import httpx
from serve_command import Command

SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1


def main() -> None:
    told: dict[str, Any] = {"interfaces": [name for _, name in socket.if_nameindex()]}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
        try:
            sock.connect(("192.0.2.1", 9))
            told["reachable"] = True
        except OSError:
            told["reachable"] = False
    command = Command("--ckpt", sys.argv[1], "--tokenizer", sys.argv[2], "--port", "0", "--max-running", "4")
    try:
        with httpx.Client(base_url=command.url(), timeout=120, trust_env=False) as http:
            for path in ("/", "/docs", "/openapi.json", "/ready", "/stats"):
                told[path] = http.get(path).status_code
            body = {"text": "hi", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
            told["tokens"] = len(http.post("/generate", json=body).json()["output_ids"])
    finally:
        command.stop()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
