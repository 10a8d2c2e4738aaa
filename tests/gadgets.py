"""Pickles that would make a marker file if anything in them ran."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


#: Twelve ways to make a marker file while a pickle is read; %s is its path, %x an expression that makes it.
GADGETS = {
    "open": b"\x80\x02cio\nopen\n%s" + text("w") + b"\x86R.",
    "os.system": b"\x80\x02cos\nsystem\n%x\x85R.",
    "posix.system by STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93%x\x85R.",
    "eval": b"\x80\x02cbuiltins\neval\n%p\x85R.",
    "exec": b"\x80\x02c__builtin__\nexec\n%p\x85R.",
    "getattr": b"\x80\x02cbuiltins\ngetattr\ncpathlib\nPosixPath\n"
    + text("touch")
    + b"\x86Rcpathlib\nPosixPath\n%s\x85R\x85R.",
    "__import__": b"\x80\x02cbuiltins\n__import__\n" + text("os") + b"\x85R.",
    "torch.load": b"\x80\x02ctorch\nload\n%s\x85R.",
    "dotted escape": b"\x80\x04\x8c\x07pathlib\x8c\x0fPosixPath.touch\x93cpathlib\nPosixPath\n%s\x85R\x85R.",
    "copyreg": b"\x80\x02ccopyreg\n_reconstructor\ncpathlib\nPosixPath\n%s\x86R.",
    "INST": b"\x80\x02(%xios\nsystem\n.",
    "OBJ": b"\x80\x02(cos\nsystem\n%xo.",
}


def gadget(name: str, marker: Path) -> bytes:
    template = GADGETS[name]
    return (
        template.replace(b"%s", text(str(marker)))
        .replace(b"%x", text(f"touch {marker}"))
        .replace(b"%p", text(f"open({str(marker)!r}, 'w')"))
    )


def archive(pickled: bytes) -> bytes:
    """A torch.save archive around a pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as zipped:
        zipped.writestr("archive/data.pkl", pickled)
        zipped.writestr("archive/byteorder", b"little")
        zipped.writestr("archive/version", b"3\n")
    return out.getvalue()
