"""``gtp-serve doctor``: whether this machine can serve, each finding with what to do about it.

Exit code 1 when something is wrong.  Torch is tried in a process of its own, because a broken one can take its
process down.
"""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from gtp_serve import __version__
from gtp_serve.errors import EnvironmentFault, UsageError
from gtp_serve.hardware import Hardware, find_hardware
from gtp_serve.server.cli import read_serve
from gtp_serve.server.failures import one_line
from gtp_serve.server.ports import bind
from gtp_serve.server.serve_options import to_options
from gtp_serve.server.settings import unknown_variables
from gtp_serve.sizes import format_gib

PACKAGE = "gtp-serve"
_LEAST_PYTHON = (3, 11)
_LEAST_RAM = 1 << 30
_LEAST_DISK = 64 << 20
_FEW_FILES = 4096
_TORCH_SECONDS = 180
_TORCH_PROBE = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
sums = [float(torch.ones(8, device=f"cuda:{n}").sum()) for n in range(gpus)]
print(json.dumps({"sum": float(torch.ones(8).sum()), "gpus": sums}))
"""


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "note", "wrong"]
    text: str
    do: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = "Check whether this machine can serve. Exit code 1 when something is wrong."
    parser.add_argument("--host", metavar="HOST", default="127.0.0.1", help="address to try (127.0.0.1)")
    parser.add_argument("--port", metavar="PORT", type=int, default=30000, help="port to try (30000)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Look at everything and print what was found."""
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port} is not possible", [("possible", "a whole number from 0 to 65535")])
    hardware = find_hardware()
    findings: list[Finding] = []
    for finding in look(hardware, args.host, args.port):
        findings.append(finding)
        if not args.json:
            print(_line(finding), flush=True)
    wrong = sum(finding.state == "wrong" for finding in findings)
    if args.json:
        print(json.dumps({"wrong": wrong, "findings": [finding._asdict() for finding in findings]}, indent=1))
    else:
        print("\n" + ("nothing is wrong" if not wrong else f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong"))
    return 1 if wrong else 0


def look(hardware: Hardware, host: str, port: int) -> Iterator[Finding]:
    """Every finding, the quick ones first."""
    yield check_python(sys.version_info[:3])
    yield check_packages(_requirements(), _installed)
    yield check_devices(hardware)
    yield check_memory(hardware)
    yield check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_folder(Path(tempfile.gettempdir()))
    yield check_port(host, port)
    yield check_settings(os.environ, Path())
    yield check_torch(hardware, [sys.executable, "-c", _TORCH_PROBE])


def _line(finding: Finding) -> str:
    mark = {"ok": "ok", "note": "..", "wrong": "!!"}[finding.state]
    lines = [f"  {mark}  {finding.name:<12}{one_line(finding.text)}"]
    if finding.do:
        lines.append(f"      {'':<12}{one_line(finding.do)}")
    return "\n".join(lines)


def check_python(version: Sequence[int]) -> Finding:
    """The interpreter."""
    text = ".".join(map(str, version))
    if tuple(version) < _LEAST_PYTHON:
        return Finding("python", "wrong", text, f"needs {'.'.join(map(str, _LEAST_PYTHON))} or newer")
    return Finding("python", "ok", f"{text}, gtp-serve {__version__}")


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*(?:>=\s*([0-9.]+))?")


def check_packages(requirements: Iterable[str], installed: Callable[[str], str | None]) -> Finding:
    """Every package that is needed always, against its lower bound."""
    needed = [line for line in requirements if "extra ==" not in line]
    bad = []
    for line in needed:
        match = _REQUIREMENT.match(line)
        if match is None:
            continue
        name, least = match.group(1), match.group(2) or "0"
        version = installed(name)
        if version is None:
            bad.append(f"{name} is missing")
        elif _numbers(version) < _numbers(least):
            bad.append(f"{name} is {version}, needed {least}")
    if bad:
        return Finding("packages", "wrong", "; ".join(bad), f"pip install --upgrade {PACKAGE}")
    if not needed:
        return Finding("packages", "note", f"{PACKAGE} runs from a folder, so its needs are not known")
    return Finding("packages", "ok", f"all {len(needed)} that are needed")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def check_devices(hardware: Hardware) -> Finding:
    """GPUs against the torch that is to use them."""
    torch = hardware.torch
    if torch is None:
        return Finding("device", "wrong", "torch is not installed", "pip install torch")
    cpu = f"cpu, {hardware.cores} cores, {_instructions(hardware)}"
    if torch.cuda is None and shutil.which("nvidia-smi") is not None:
        return Finding(
            "device",
            "wrong",
            f"a GPU driver is here, and torch {torch.version} is a build without CUDA",
            "install a torch with CUDA, or serve with --device cpu",
        )
    if hardware.gpus:
        names = [f"{gpu.name} ({format_gib(gpu.memory.total)})" for gpu in hardware.gpus]
        return Finding("device", "ok", f"cuda {torch.cuda}: {', '.join(names)}")
    if torch.cuda is not None:
        return Finding("device", "note", f"torch has CUDA {torch.cuda}, and no GPU answers; {cpu}")
    return Finding("device", "ok", cpu)


def _instructions(hardware: Hardware) -> str:
    for flag, words in (
        ("amx_bf16", "AMX bf16"),
        ("avx512_bf16", "AVX-512 bf16"),
        ("avx512f", "AVX-512"),
        ("avx2", "AVX2"),
        ("asimd", "NEON"),
    ):
        if flag in hardware.cpu_flags:
            return words
    return "no wide instructions: slow"


def check_memory(hardware: Hardware) -> Finding:
    """Host memory, as a container sees it."""
    ram = hardware.ram
    text = f"{format_gib(ram.available)} free of {format_gib(ram.total)}"
    if ram.available < _LEAST_RAM:
        return Finding("memory", "wrong", text, f"needs {format_gib(_LEAST_RAM)} for the smallest model")
    return Finding("memory", "ok", text)


def check_files(limit: int) -> Finding:
    """How many connections there may be."""
    if limit != resource.RLIM_INFINITY and limit < _FEW_FILES:
        return Finding("open files", "note", f"at most {limit}, so about as many connections", "ulimit -n 65536")
    return Finding("open files", "ok", "as many as wanted" if limit == resource.RLIM_INFINITY else f"up to {limit}")


def check_folder(folder: Path) -> Finding:
    """Whether small files can be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="gtp-serve-") as file:
            file.write(b"x" * 4096)
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "is full" if full else f"cannot be written: {error.strerror}"
        return Finding("scratch", "wrong", f"{folder} {reason}", "set TMPDIR to a folder that can be written")
    if free < _LEAST_DISK:
        return Finding("scratch", "wrong", f"{folder} has {format_gib(free)} free", "set TMPDIR to another disk")
    return Finding("scratch", "ok", f"{folder}, {format_gib(free)} free")


def check_port(host: str, port: int) -> Finding:
    """Whether the server's address can be listened on."""
    try:
        bind(host, port).close()
    except EnvironmentFault as error:
        return Finding("port", "wrong", error.message, "; ".join(f"{label}: {text}" for label, text in error.details))
    return Finding("port", "ok", f"{host}:{port} is free")


def check_settings(environment: Mapping[str, str], folder: Path) -> Finding:
    """What the environment and ./gtp-serve.toml set, read as the server will."""
    try:
        _, given = read_serve(["--ckpt", "."] if "GTP_SERVE_CKPT" not in environment else [], environment, folder)
        to_options(given)
    except UsageError as error:
        return Finding("settings", "wrong", error.message, "; ".join(f"{a}: {b}" for a, b in error.details))
    odd = unknown_variables(environment)
    if odd:
        text = "; ".join(name + (f" is no setting, {near} is" if near else " is no setting") for name, near in odd)
        return Finding("settings", "note", text, "gtp-serve --help-all lists the settings")
    count = sum(given.source(key) != "command line" for key in given)
    return Finding(
        "settings", "ok", f"{count} set outside the command line" if count else "none outside the command line"
    )


def check_torch(hardware: Hardware, command: Sequence[str]) -> Finding:
    """Whether torch really runs, on every GPU that it sees."""
    if hardware.torch is None:
        return Finding("torch", "wrong", "not installed", "pip install torch")
    version = hardware.torch.version
    begun = time.monotonic()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding("torch", "wrong", f"{version} did not answer within {_TORCH_SECONDS} s", "look at its GPUs")
    words = ran.stderr.strip().splitlines()
    if ran.returncode < 0:
        return Finding(
            "torch", "wrong", f"{version} ended its process with signal {-ran.returncode}", "reinstall torch"
        )
    try:
        answer = json.loads(ran.stdout.strip().splitlines()[-1]) if ran.returncode == 0 else None
    except (ValueError, IndexError):
        answer = None
    if answer is None:
        return Finding(
            "torch", "wrong", f"{version} fails: {words[-1] if words else 'it said nothing'}", "reinstall torch"
        )
    if {answer["sum"], *answer["gpus"]} != {8.0}:
        return Finding("torch", "wrong", f"{version} adds eight ones to {answer}", "a device computes wrongly")
    gpus = f" and {len(answer['gpus'])} GPUs" if answer["gpus"] else ""
    return Finding("torch", "ok", f"{version} computes on the cpu{gpus} ({time.monotonic() - begun:.1f} s to begin)")
