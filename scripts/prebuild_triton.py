"""Compile, while an image is built, the one C file for which Triton would want a compiler at its first kernel.

    TRITON_CACHE_DIR=DIR TRITON_LIBCUDA_PATH=LIBS python scripts/prebuild_triton.py

The object goes into Triton's own cache.  Its key holds both variables and what the command ``file`` says of Python, if
there is one, so all of that must be the same at run time.  The real libcuda comes with the driver; a stub of its name
stands in for the linker.  Without Triton (a CPU build of torch) there is nothing to do.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Say what was compiled, or that nothing was."""
    try:
        build = importlib.import_module("triton.runtime.build")
        driver = importlib.import_module("triton.backends.nvidia.driver")
    except ImportError:
        print("no Triton here: nothing to compile")
        return 0
    libraries = Path(os.environ["TRITON_LIBCUDA_PATH"])
    stub = libraries / "libcuda.so.1"
    made = not stub.exists()
    if made:
        command = ["gcc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", str(stub)]
        subprocess.run(command, check=True)
    try:
        path = build.compile_so_from_file(
            src_path=str(Path(str(driver.__file__)).parent / "driver.c"),
            name="cuda_utils",
            library_dirs=driver.library_dirs(),
            include_dirs=driver.include_dirs,
            libraries=driver.libraries,
        )
    finally:
        if made:
            stub.unlink()
    print(f"compiled {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
