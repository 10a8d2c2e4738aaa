"""Exit 0 while the server makes progress, 1 otherwise; for a container's health check.  Standard library only.

It asks 127.0.0.1 at GTP_SERVE_PORT (30000); with an argument, that URL.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

_SECONDS = 4


def main(argv: Sequence[str]) -> int:
    """Ask ``/health`` once and say what it said."""
    port = os.environ.get("GTP_SERVE_PORT", "")
    # Kubernetes puts GTP_SERVE_PORT=tcp://... into pods beside a service of this name.
    url = argv[0] if argv else f"http://127.0.0.1:{port if port.isdigit() else 30000}"
    # A proxy of the environment has no business between a server and itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=_SECONDS) as reply:
            print(reply.read(300).decode(errors="replace"))
        return 0
    except urllib.error.HTTPError as error:
        print(f"{error.code}: {error.read(300).decode(errors='replace')}")
    except (OSError, ValueError) as error:
        print(f"no answer: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
