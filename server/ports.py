"""Binds the port before anything else, and says who has it when it is taken."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from gtp_serve.errors import EnvironmentFault
from gtp_serve.server.failures import one_line

_BACKLOG = 2048
_PROC = Path("/proc")
_LISTEN = "0A"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; requests wait in it until the server takes them.

    :raises EnvironmentFault: when the address is taken, forbidden or no address of this machine.
    """
    family, address = _resolve(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: an answer is written in two parts, and the second would wait 40 ms for the client's
        # kernel to confirm the first.  Not every event loop sees to it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _refused(host, port, error) from error
    listener.setblocking(False)
    return listener


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise EnvironmentFault(
            f"--host '{host}' is not an address",
            [("saw", str(error)), ("try", "--host 127.0.0.1")],
            code="bad-host",
        ) from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


def _refused(host: str, port: int, error: OSError) -> EnvironmentFault:
    where = display_address(host, port)
    if error.errno == errno.EADDRINUSE:
        details = [("used by", user) for user in [find_user(port)] if user]
        details.append(("try", f"--port {port + 1 if port < 65535 else port - 1}, or --port 0 to pick a free one"))
        return EnvironmentFault(f"{where} is in use", details, code="port-in-use")
    if error.errno == errno.EACCES:
        return EnvironmentFault(
            f"this user may not listen on {where}",
            [("try", "--port with a number of 1024 or more")],
            code="port-denied",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return EnvironmentFault(
            f"{host} is no address of this machine",
            [("try", "--host 127.0.0.1 or --host 0.0.0.0")],
            code="bad-host",
        )
    return EnvironmentFault(f"cannot listen on {where}: {error.strerror or error}", code="port")


def display_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """The address that a client on this machine uses."""
    host, port = listener.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http{'s' if tls else ''}://{display_address(local, port)}"


def find_user(port: int, *, proc: Path = _PROC) -> str:
    """``pid 4711 (python train.py)`` of whoever listens on the port; empty when that cannot be seen."""
    inodes = _listening_inodes(port, proc)
    for folder in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)) if inodes else ():
        if _holds(folder, inodes):
            return f"pid {folder.name} ({_command(folder)})"
    return ""


def _listening_inodes(port: int, proc: Path) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except (OSError, UnicodeError):
            continue
        for fields in map(str.split, lines):
            if len(fields) > 9 and fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _holds(folder: Path, inodes: set[str]) -> bool:
    try:
        links = list((folder / "fd").iterdir())
    except OSError:
        return False
    return any(_target(link) == f"socket:[{inode}]" for link in links for inode in inodes)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""  # closed in the meantime


def _command(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    text = one_line(b" ".join(words).decode("utf-8", "replace")).strip()
    return text if len(text) <= 60 else text[:57] + "..."
