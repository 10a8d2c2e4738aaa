"""The image's recipe against the tree that it is built from, and the health check that runs inside."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEALTHCHECK = ROOT / "scripts" / "healthcheck.py"


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of each instruction; comments and line ends taken away."""
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    lines = (line.strip().partition(" ") for line in text.splitlines() if line.strip())
    return [(word, rest.strip()) for word, _, rest in lines]


def stages() -> list[list[tuple[str, str]]]:
    """Instructions by stage, the ones before the first FROM left out."""
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        elif found:
            found[-1].append((word, rest))
    return found


def in_context(path: str) -> bool:
    """Whether .dockerignore lets a path through: the last rule that fits it, or a folder above it, decides."""
    kept = True
    parts = Path(path).parts
    above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        rule = line.strip()
        if not rule or rule.startswith("#"):
            continue
        name = rule.removeprefix("!").removeprefix("**/")
        if any(fnmatch.fnmatch(one, name) or fnmatch.fnmatch(Path(one).name, name) for one in above):
            kept = rule.startswith("!")
    return kept


def test_every_word_is_an_instruction() -> None:
    known = {"ARG", "FROM", "WORKDIR", "RUN", "ENV", "COPY", "LABEL", "USER", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL"}

    assert {word for word, _ in instructions()} <= known | {"ENTRYPOINT"}
    assert len(stages()) == 2


def test_everything_that_is_copied_exists_and_is_in_the_build_context() -> None:
    copied = [
        path
        for stage in stages()
        for word, rest in stage
        if word == "COPY" and "--from" not in rest
        for path in shlex.split(rest)[:-1]
    ]

    assert {"gtp_serve", "server", "loaders", "scripts/healthcheck.py"} <= set(copied)
    assert [path for path in copied if not (ROOT / path).exists()] == []
    assert [path for path in copied if not in_context(path)] == []


def test_what_is_no_part_of_the_image_stays_out_of_the_build_context() -> None:
    for path in (".git/config", ".venv/bin/python", "tests/conftest.py", "docs/refit.md", "server/__pycache__/x.pyc"):
        assert not in_context(path), path
    assert in_context("gtp_serve/engine/engine.py")


def test_what_is_taken_from_the_first_stage_was_made_there() -> None:
    first, last = stages()
    made = " ".join(rest for word, rest in first if word in ("RUN", "ENV"))

    for word, rest in last:
        if word == "COPY" and "--from=build" in rest:
            assert shlex.split(rest)[-2] in made


def test_the_last_stage_installs_nothing_and_runs_as_nobody_in_particular() -> None:
    last = stages()[-1]
    words = [word for word, _ in last]
    runs = [rest for word, rest in last if word == "RUN"]

    assert not any(re.search(r"apt|pip|gcc|curl", run) for run in runs)
    (user,) = [rest for word, rest in last if word == "USER"]
    assert user.isdigit()
    assert int(user) >= 1000
    assert f"--uid {user}" in runs[0]
    assert words.index("USER") > max(index for index, word in enumerate(words) if word in ("RUN", "COPY"))


def test_the_health_check_runs_a_file_that_is_there_by_an_interpreter_that_is_there() -> None:
    last = stages()[-1]
    (check,) = [rest for word, rest in last if word == "HEALTHCHECK"]
    command = json.loads(check.partition("CMD ")[2])
    places = {shlex.split(rest)[-1] for word, rest in last if word == "COPY"}

    assert command[0] == "python"
    assert command[1] in places
    assert re.search(r"--start-period=\d+s", check)


def test_labels_are_the_projects() -> None:
    labels = dict(part.split("=", 1) for word, rest in stages()[-1] if word == "LABEL" for part in shlex.split(rest))
    pyproject = (ROOT / "pyproject.toml").read_text()

    assert labels["org.opencontainers.image.licenses"] in pyproject
    assert labels["org.opencontainers.image.description"] in pyproject


def test_both_stages_have_the_same_triton_cache() -> None:
    """Its key holds both variables: one that differs would ask for a compiler that is not there."""
    pattern = r"(TRITON_\w+)=(\S+)"
    first, last = (
        dict(re.findall(pattern, " ".join(rest for word, rest in stage if word == "ENV"))) for stage in stages()
    )

    assert first == last
    assert set(first) == {"TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH"}


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(b'{"status": "x"}')

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield str(server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def check_health(port: str, *words: str) -> tuple[int, str]:
    """Under -I -S: nothing but the standard library, as the image's own interpreter may have it."""
    done = subprocess.run(
        [sys.executable, "-S", str(HEALTHCHECK), *words],
        env={"GTP_SERVE_PORT": port, "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (404, 1)])
def test_the_health_check_says_what_the_server_says(status: int, code: int) -> None:
    with answering(status) as port:
        assert check_health(port)[0] == code
        assert check_health("1", f"http://127.0.0.1:{port}/")[0] == code


def test_the_health_check_of_a_server_that_is_not_there_fails_in_one_line() -> None:
    code, text = check_health("1")

    assert code == 1
    assert re.fullmatch(r"no answer: .+\n", text)
