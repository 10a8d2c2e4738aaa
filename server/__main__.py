"""``python -m gtp_serve.server``: the same as the ``gtp-serve`` command."""

from __future__ import annotations

import sys

from gtp_serve.server.cli import main

if __name__ == "__main__":
    sys.exit(main())
