"""A certificate for 127.0.0.1 that nobody vouches for, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

OPENSSL = shutil.which("openssl")


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Certificate and key, as PEM files."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([str(OPENSSL), *words.split(), *names], check=True, capture_output=True)
    return cert, key
