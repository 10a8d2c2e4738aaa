from __future__ import annotations

import argparse
import importlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from golden_file import same_as_golden

from gtp_serve import __version__
from gtp_serve.errors import UsageError
from gtp_serve.server import cli
from gtp_serve.server.flags import ALIASES
from gtp_serve.server.foreign_flags import FOREIGN
from gtp_serve.server.options import ServeOptions
from gtp_serve.server.settings import SETTINGS
from gtp_serve.sizes import parse_size

BASE = ServeOptions(ckpt=Path("run"))

MISTAKES = [
    [],
    ["--ckpt"],
    ["--ckpt", "run", "--tp", "0"],
    ["--ckpt", "run", "--prot", "8000"],
    ["--ckpt", "run", "--maxrunning", "8"],
    ["--ckpt", "run", "--xyzzy"],
    ["--ckpt", "run", "--quantization", "fp8"],
    ["--ckpt", "run", "--bf16"],
    ["--ckpt", "run", "--pipeline-model-parallel-size", "2"],
    ["--ckpt", "run", "--seed=3"],
    ["--ckpt", "run", "--log-level", "loud"],
    ["/ckpts/my-run"],
    ["--ckpt", "run", "--port", "99999"],
    ["--ckpt", "run", "--port", "-1"],
    ["--ckpt", "run", "--context", "many"],
    ["--ckpt", "run", "--dtype", "int8"],
    ["--ckpt", "run", "--attention-backend", "fa3"],
    ["--ckpt", "run", "--device", "tpu"],
    ["--ckpt", "run", "--mem-fraction", "nan"],
    ["--ckpt", "run", "--mem-fraction", "1.5"],
    ["--ckpt", "run", "--kv-memory", "plenty"],
    ["--ckpt", "run", "--drain-timeout", "inf"],
    ["--ckpt", "run", "--tokenizer", "x", "--no-tokenizer"],
]


def options(*words: str) -> ServeOptions:
    return cli.parse_serve(["--ckpt", "run", *words])


def test_help_is_the_committed_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    same_as_golden("help.txt", capsys.readouterr().out)


def test_serve_and_no_word_have_one_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    same_as_golden("help.txt", capsys.readouterr().out)


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"gtp-serve {__version__}\n")


def test_each_mistake_has_the_committed_answer_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    written = []
    for words in MISTAKES:
        assert cli.main(words) == 2
        written.append(f"$ gtp-serve {' '.join(words)}\n{capsys.readouterr().err}")
    same_as_golden("usage-errors.txt", "\n".join(written))


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom gtp_serve.server.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'starlette', 'uvicorn', 'msgspec', 'zmq', 'rich', 'tokenizers'}\n"
        "sys.stderr.write(' '.join(sorted(heavy & set(sys.modules))))"
    )
    seconds = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Of the processor: on a busy machine the clock on the wall tells of other programs.
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert ran.stderr == ""
    assert min(seconds) < 0.3


def test_more_and_less_talk_exclude_each_other() -> None:
    with pytest.raises(UsageError):
        options("-v", "-q")


def test_without_options_each_has_its_documented_default() -> None:
    assert options() == BASE
    assert (BASE.host, BASE.port, BASE.drain_timeout, BASE.tp) == ("127.0.0.1", 30000, 30.0, 1)


def test_each_option_arrives_where_it_belongs() -> None:
    given = options(
        *(
            "--iteration",
            "7",
            "--tokenizer",
            "tok",
            "--chat-template",
            "t.jinja",
            "--name",
            "m",
            "--dtype",
            "bf16",
        ),
        *("--context", "128", "--device", "cpu", "--mem-fraction", "0.25", "--kv-memory", "2GiB"),
        *(
            "--max-running",
            "3",
            "--host",
            "0.0.0.0",
            "--port",
            "0",
            "--drain-timeout",
            "1.5",
            "--log",
            "json",
            "-v",
            "--no-prefix-cache",
            "--attention-backend",
            "FLASH_ATTN",
        ),
        *("--saved-tp", "2", "--saved-gtp", "4", "--saved-etp", "1", "--saved-egtp", "8"),
    )
    assert (given.iteration, given.tokenizer, given.name, given.dtype) == (7, Path("tok"), "m", "bfloat16")
    assert (given.context, given.device, given.mem_fraction, given.kv_memory) == (128, "cpu", 0.25, 2 << 30)
    assert (given.max_running, given.host, given.port, given.drain_timeout) == (3, "0.0.0.0", 0, 1.5)
    assert (given.log, given.verbosity, given.chat_template) == ("json", 1, Path("t.jinja"))
    assert (given.prefix_cache, BASE.prefix_cache) == (False, True)
    assert (given.attention, BASE.attention) == ("flash-attn", "auto")
    assert (given.saved.tp, given.saved.gtp, given.saved.etp, given.saved.egtp) == (2, 4, 1, 8)


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_of_another_server_means_ours(alias: str) -> None:
    value = {"--ckpt": "run", "--tp": "1", "--kv-memory": "1GiB", "--mem-fraction": "0.5"}.get(ALIASES[alias], "9")
    switches = ("--no-tokenizer", "--no-prefix-cache", "--prefix-cache", "--no-graphs", "--deterministic")
    words = [] if ALIASES[alias] in switches else [value]
    base = [] if ALIASES[alias] == "--ckpt" else ["--ckpt", "run"]
    ours = cli.parse_serve([*base, ALIASES[alias], *words])
    assert cli.parse_serve([*base, alias, *words]) == ours
    if words:
        assert cli.parse_serve([*base, f"{alias}={value}"]) == ours


def test_silent_options_change_nothing_and_log_levels_become_ours() -> None:
    assert options("--enable-prefix-caching", "--use-checkpoint-args") == BASE
    assert options("--log-level", "debug").verbosity == 1
    assert options("--log-level=ERROR").verbosity == -1
    assert options("--log-level", "info").verbosity == 0


def test_no_alias_and_no_foreign_option_is_one_of_ours() -> None:
    ours = {word for action in cli.build_serve_parser()._actions for word in action.option_strings}
    assert not ours & {*ALIASES, *FOREIGN}
    assert set(ALIASES.values()) <= ours


@pytest.mark.parametrize(
    ("words", "whose", "here"),
    [
        (["--tool-call-parser", "hermes"], "vLLM's and SGLang's", "calls in JSON are recognised"),
        (["-pp", "2"], "vLLM's", "loads at any --tp"),
        (["--disaggregation-mode", "prefill"], "SGLang's", "not in this version"),
        (["--swiglu"], "Megatron's", "described by the checkpoint"),
        (["--quantization", "fp8"], "vLLM's and SGLang's", "--quant int8"),
    ],
)
def test_options_of_other_servers_are_known_and_answered(words: list[str], whose: str, here: str) -> None:
    with pytest.raises(UsageError, match=f"that is {whose}") as caught:
        options(*words)
    assert here in str(caught.value)


@pytest.mark.parametrize(
    ("words", "says", "helps"),
    [
        (["inspct", "run"], "there is no command 'inspct'", "gtp-serve inspect"),
        (["wieghts", "http://a:1"], "there is no command 'wieghts'", "gtp-serve weights"),
        (["run"], "unexpected argument 'run'", "gtp-serve --ckpt run"),
        (["inspect", "run", "--jsn"], "unknown option --jsn", "--json"),
        (["push", "http://a:1", "--ckpt", "run", "--dryrun"], "unknown option --dryrun", "--dry-run"),
        (["inspect", "run", "run"], "unexpected argument 'run'", "gtp-serve inspect --help"),
    ],
)
def test_a_slip_in_a_command_or_its_options_names_the_nearest(
    words: list[str], says: str, helps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert says in told
    assert helps in told


def test_what_starts_other_servers_with_tools_and_sleep_starts_this_one() -> None:
    assert options("--enable-auto-tool-choice", "--enable-sleep-mode", "--enable-memory-saver") == BASE


def test_the_help_is_one_screen_of_at_most_28_options() -> None:
    shown = [
        action
        for action in cli.build_serve_parser()._actions
        if action.help != argparse.SUPPRESS and action.dest not in ("help", "version")
    ]

    assert len(shown) <= 28
    assert len(cli.build_serve_parser().format_help().splitlines()) <= 55
    everything = cli.build_serve_parser(everything=True).format_help()
    for setting in SETTINGS:
        assert f" {setting.option} " in everything or setting.key in everything


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4GiB", 4 << 30),
        ("512M", 512 << 20),
        ("2.5GB", 2_500_000_000),
        ("1 kib", 1024),
        ("3g", 3 << 30),
    ],
)
def test_sizes_are_binary_but_for_the_decimal_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "GiB", "1XB", "1e9", "nan", "4 Gi B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


def test_commands_are_imported_only_when_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Command:
        @staticmethod
        def add_arguments(parser: object) -> None: ...

        @staticmethod
        def run(args: object) -> int:
            return 17

    def load(name: str) -> type[Command]:
        asked.append(name)
        return Command

    monkeypatch.setattr(importlib, "import_module", load)
    assert cli.main(["demo"]) == 17
    assert asked == ["gtp_serve.server.demo"]


def test_options_of_weight_updates_arrive_and_the_key_is_shown_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    monkeypatch.delenv("GTP_SERVE_ADMIN_KEY", raising=False)
    words = ("--refit-memory", "inplace", "--refit-timeout", "9", "--refit-host", "10.0.0.1")
    given = options("--admin-key-file", str(file), *words)
    assert (given.admin_key, given.refit_memory, given.refit_timeout) == ("s3cret", "inplace", 9.0)
    assert given.refit_host == "10.0.0.1"
    assert "s3cret" not in repr(given)
    assert (BASE.admin_key, BASE.refit_memory, BASE.refit_timeout) == (None, "auto", 120.0)
    monkeypatch.setenv("GTP_SERVE_ADMIN_KEY", "from-environment")
    assert options().admin_key == "from-environment"
    for wrong in (("--admin-key", "a b"), ("--refit-memory", "both"), ("--refit-timeout", "0")):
        with pytest.raises(UsageError, match=wrong[0]):
            options(*wrong)
