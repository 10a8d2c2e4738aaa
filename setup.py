"""The native part of the build; all else stands in pyproject.toml."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# By its path: the package cannot be imported before it is built.
NATIVE = runpy.run_path(str(ROOT / "gtp_serve" / "ops" / "cpu" / "build.py"))


class BuildNative(build_ext):
    """Compiles the CPU ops; without a compiler the package is built without them and serves through torch."""

    def get_ext_filename(self, fullname: str) -> str:
        """No Python ABI in the name: ctypes loads it."""
        return str(Path(*fullname.split(".")[:-1]) / NATIVE["LIBRARY"])

    def build_extension(self, ext: Extension) -> None:
        """Compile all instruction sets."""
        try:
            NATIVE["build"](Path(self.get_ext_fullpath(ext.name)), kept=ROOT / "build" / "native")
        except NATIVE["BuildError"] as reason:
            print(f"built without native CPU ops, plain torch will serve instead: {reason}", file=sys.stderr)


sources = sorted(path for path in NATIVE["SOURCES"].rglob("*") if path.suffix in (".cpp", ".h"))
setup(
    ext_modules=[
        Extension("gtp_serve.ops.cpu._native", [str(path.relative_to(ROOT)) for path in sources], optional=True)
    ],
    cmdclass={"build_ext": BuildNative},
)
