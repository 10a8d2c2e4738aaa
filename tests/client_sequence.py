"""Plays a recorded client against a server: its HTTP calls as they are, and rank 0 of its group with gloo.

Run as a process: ``python client_sequence.py URL RECORDING FOLDER OPTIONS`` prints one JSON line for each call.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from foreign_trainer import NamedGroup, StatelessGroup, described, flattened, free_port, packed
from safetensors.torch import load_file
from torch import Tensor

DEFAULT_BUCKET = 1 << 30
"""vLLM's, of packed broadcasts."""
SECONDS = 120.0


class Player:
    """One run of a recording.

    :param options: ``ranks`` of the engine, ``bucket_bytes``, ``weight_version``; ``leave_out``: names of tensors
        that are not sent; ``rename``: false names for some; ``die_at``: the broadcast before which rank 0 is gone.
    """

    def __init__(self, url: str, folder: Path, options: Mapping[str, Any]) -> None:
        self._url, self._options = url, options
        tensors = load_file(folder / "model.safetensors")
        false = options.get("rename", {})
        self._tensors = {
            false.get(name, name): tensor
            for name, tensor in tensors.items()
            if name not in options.get("leave_out", ())
        }
        self._broadcasts = 0
        self._ranks = int(options.get("ranks", 1))
        self._known: dict[str, Any] = {
            "$master_address": "127.0.0.1",
            "$master_port": free_port(),
            "$ranks": self._ranks,
            "$world_size": 1 + self._ranks,
            "$folder": str(folder),
            "$weight_version": options.get("weight_version", "1"),
        }
        self._group: NamedGroup | StatelessGroup | None = None

    def play(self, recording: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for step in recording["steps"]:
            for tensors in self._parts(step.get("each")):
                yield self._step(step, tensors)

    def _parts(self, each: str | None) -> Iterator[dict[str, Tensor]]:
        if each != "bucket":
            yield self._tensors if each == "model" else {}
            return
        part: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            if part and sum(one.nbytes for one in part.values()) + tensor.nbytes > self._options["bucket_bytes"]:
                yield part
                part = {}
            part[name] = tensor
        yield part

    def _step(self, step: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The call in a thread of its own while rank 0 does its part, as the clients do it."""
        lists = {f"${kind}": value for kind, value in described(tensors).items()}
        answers: list[tuple[int, Any]] = []
        call = threading.Thread(target=lambda: answers.append(self._call(step, {**self._known, **lists})))
        call.start()
        self._rank0(step, tensors)
        call.join(SECONDS)
        expected = filled(step["answer"], self._known)
        return {"path": step["path"], "status": answers[0][0], "answer": answers[0][1], "expected": expected}

    def _call(self, step: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[int, Any]:
        url = self._url + step["path"] + (f"?{step['query']}" if "query" in step else "")
        body = json.dumps(filled(step["json"], known)).encode() if "json" in step else None
        headers = {"content-type": "application/json"} if body is not None else {}
        request = urllib.request.Request(url, data=body, headers=headers, method=step.get("method", "POST"))
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as response:
                status, raw = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        text = raw.decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def _rank0(self, step: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        part = step.get("rank0")
        if part in (None, "leave"):
            if part == "leave" and self._group is not None:
                self._group.close()
            return
        if part == "join":
            name, port = step["json"]["group_name"], self._known["$master_port"]
            self._group = NamedGroup(name, port, self._known["$world_size"])
            return
        if part == "join_stateless":
            self._group = StatelessGroup(self._known["$master_port"], self._known["$world_size"])
            return
        assert self._group is not None
        self._broadcasts += 1
        if self._broadcasts == self._options.get("die_at"):
            time.sleep(0.5)  # the call is on its way
            os._exit(9)
        whole = list(tensors.values())
        forms: dict[str, Callable[[], list[Tensor]]] = {
            "broadcast": lambda: whole,
            "broadcast_flattened": lambda: [flattened(whole)],
            "broadcast_packed": lambda: list(packed(whole, DEFAULT_BUCKET)),
        }
        self._group.broadcast_all(forms[part]())


def filled(value: Any, known: Mapping[str, Any]) -> Any:
    """A recorded value with what only this run knows."""
    if isinstance(value, dict):
        return {name: filled(inner, known) for name, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, known) for inner in value]
    return known[value] if isinstance(value, str) and value.startswith("$") else value


def played(url: str, recording: Path, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """What came of each call of a client that is a process of its own; those before its death if it dies."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["client_sequence"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_played, args=(url, recording, folder, options, theirs))
    process.start()
    theirs.close()
    found: list[dict[str, Any]] = []
    try:
        while ours.poll(SECONDS):
            found.append(ours.recv())
        raise AssertionError(f"the client hangs after {found}")
    except EOFError:
        return found
    finally:
        process.kill()
        process.join()


def _send_played(url: str, recording: Path, folder: Path, options: Mapping[str, Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    for line in Player(url, folder, options).play(json.loads(recording.read_text(encoding="utf-8"))):
        pipe.send(line)


def main(url: str, recording: str, folder: str, options: str) -> None:
    torch.set_num_threads(1)
    player = Player(url, Path(folder), json.loads(options))
    for line in player.play(json.loads(Path(recording).read_text(encoding="utf-8"))):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
