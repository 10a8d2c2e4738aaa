"""The sockets of a set of processes, from the kernel's own tables."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_STATES = {"01": "established", "02": "connecting", "0A": "listening"}
_LISTENING_UNIX = 0x10000


class Socket(NamedTuple):
    """One socket: kind as tcp, udp, raw or unix; addresses as ``host:port``, of a unix socket its path."""

    kind: str
    state: str
    local: str
    remote: str

    @property
    def loopback(self) -> bool:
        """Whether both ends can only be on this machine."""
        return all(ipaddress.ip_address(end.rpartition(":")[0].strip("[]")).is_loopback for end in self[2:])


def processes(root: int) -> set[int]:
    """A process and everything below it."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def sockets(pids: Iterable[int]) -> set[Socket]:
    """Every socket that one of the processes holds and that has an address."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        path = Path("/proc/net") / kind
        for fields in (line.split() for line in path.read_text().splitlines()[1:]) if path.exists() else ():
            if fields[9] in inodes:
                state = _STATES.get(fields[3], fields[3])
                found.add(Socket(kind.rstrip("6"), state, _address(fields[1]), _address(fields[2])))
    for fields in (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]):
        if fields[6] in inodes and int(fields[3], 16) & _LISTENING_UNIX:
            found.add(Socket("unix", "listening", fields[7] if len(fields) > 7 else "", ""))
    return found


def _address(text: str) -> str:
    """``0100007F:7530`` as ``127.0.0.1:30000``; the kernel writes words of the machine's own byte order."""
    host, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    shown = socket.inet_ntop(family, raw)
    return f"[{shown}]:{int(port, 16)}" if family == socket.AF_INET6 else f"{shown}:{int(port, 16)}"
