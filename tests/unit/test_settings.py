"""Where a setting may be said, which source wins, and what is printed of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from gtp_serve.errors import UsageError
from gtp_serve.server import cli
from gtp_serve.server.settings import SETTINGS

DATA = Path(__file__).parents[1] / "data"
CKPT = DATA / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"


def config(folder: Path, text: str) -> Path:
    path = folder / "gtp-serve.toml"
    path.write_text(text)
    return path


def test_command_line_wins_over_environment_and_that_over_the_file(tmp_path: Path) -> None:
    config(tmp_path, 'ckpt = "run"\ntp = 4\nport = 1\ncontext = 7\nlog = "json"\n')
    environment = {"GTP_SERVE_TP": "3", "GTP_SERVE_PORT": "2"}

    options = cli.parse_serve(["--tp", "2"], environment, tmp_path)

    assert (options.tp, options.port, options.context, options.log) == (2, 2, 7, "json")
    assert options.host == "127.0.0.1"


def test_paths_in_a_file_start_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    path = config(tmp_path / "conf", 'ckpt = "run"\ntokenizer = "/abs/tok"\n')

    options = cli.parse_serve(["--config", str(path)], {}, tmp_path)

    assert (options.ckpt, options.tokenizer) == (tmp_path / "conf" / "run", Path("/abs/tok"))


def test_the_file_is_named_by_option_or_environment_or_lies_here(tmp_path: Path) -> None:
    here = config(tmp_path, "ckpt = 'here'\n")
    there = tmp_path / "there.toml"
    there.write_text("ckpt = 'there'\n")
    third = tmp_path / "third.toml"
    third.write_text("ckpt = 'third'\n")

    assert cli.parse_serve([], {}, here.parent).ckpt.name == "here"
    assert cli.parse_serve([], {"GTP_SERVE_CONFIG": str(there)}, here.parent).ckpt.name == "there"
    given = ["--config", str(third)]
    assert cli.parse_serve(given, {"GTP_SERVE_CONFIG": str(there)}, here.parent).ckpt.name == "third"
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        cli.parse_serve([], {"GTP_SERVE_CONFIG": "nowhere.toml"}, here.parent)


def test_a_switch_can_be_turned_either_way_by_each_source(tmp_path: Path) -> None:
    config(tmp_path, 'ckpt = "run"\nprefix_cache = false\ndeterministic = true\ngraphs = false\n')

    plain = cli.parse_serve([], {}, tmp_path)
    assert (plain.prefix_cache, plain.deterministic, plain.graphs) == (False, True, False)
    turned = cli.parse_serve(["--prefix-cache", "--no-deterministic"], {"GTP_SERVE_GRAPHS": "yes"}, tmp_path)
    assert (turned.prefix_cache, turned.deterministic, turned.graphs) == (True, False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_runing = 3", "unknown key 'max_runing'; nearest: max_running"),
        ("kv-memory = '1GiB'", "unknown key 'kv-memory'; nearest: kv_memory"),
        ("[scheduler]\nmax_running = 3", "unknown key 'scheduler'; possible: ckpt, "),
        ("tp = 'two'", "tp in .*gtp-serve.toml is 'two'; possible: a number"),
        ("tp = true", "tp in .*gtp-serve.toml is True; possible: a number"),
        ("tp = 0", "tp in .*gtp-serve.toml '0' is not possible; possible: a whole number from 1 to 1024"),
        ("tp = 1.5", "tp in .*gtp-serve.toml '1.5' is not possible"),
        ("mem_fraction = nan", "mem_fraction in .*gtp-serve.toml 'nan' is not possible"),
        ("name = 7", "name in .*gtp-serve.toml is 7; possible: a text"),
        ("prefix_cache = 'no'", "prefix_cache in .*gtp-serve.toml is 'no'; possible: true or false"),
        ("tp = 1\ntp = 2", "is not TOML: Cannot overwrite a value \\(at"),
        ("tls_cert = 'c.pem'", "tls_cert in .*gtp-serve.toml needs tls_key beside it"),
        ("cors = 'https://a.b'", "cors in .* is 'https://a.b'; possible: texts"),
        ("cors = ['*']", "cors in .* has '\\*'; possible: origins such as"),
        ("cors = ['https://a.b/path']", "cors in .* has 'https://a.b/path'"),
        ("admin_key = 'a b'", "admin_key in .* is not a key"),
        ("api_key = 'a'\napi_key_file = 'f'", "api_key in .* and api_key_file in .* exclude each other"),
    ],
)
def test_a_mistake_in_the_file_names_key_and_remedy(text: str, message: str, tmp_path: Path) -> None:
    config(tmp_path, text)

    with pytest.raises(UsageError, match=message):
        cli.parse_serve(["--ckpt", "run"], {}, tmp_path)


@pytest.mark.parametrize("variable", [s.variable for s in SETTINGS if s.kind in ("number", "switch")])
def test_a_mistake_in_the_environment_names_the_variable(variable: str) -> None:
    if variable in ("GTP_SERVE_MAX_WAITING",):
        return  # of the file only
    with pytest.raises(UsageError, match=rf"^{variable} 'many' is not possible"):
        cli.parse_serve(["--ckpt", "run"], {variable: "many"}, DATA)


def test_what_kubernetes_sets_for_a_service_of_this_name_is_not_ours() -> None:
    environment = {"GTP_SERVE_PORT": "tcp://10.0.0.1:80", "GTP_SERVE_SERVICE_HOST": "10.0.0.1"}

    assert cli.parse_serve(["--ckpt", "run"], environment, DATA).port == 30000


def test_of_a_key_and_its_file_the_stronger_source_wins(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    config(tmp_path, 'ckpt = "run"\napi_key_file = "key"\nadmin_key_file = "key"\n')

    assert cli.parse_serve([], {}, tmp_path).api_key == "from-file"
    options = cli.parse_serve([], {"GTP_SERVE_API_KEY": "from-variable"}, tmp_path)
    assert (options.api_key, options.admin_key) == ("from-variable", "from-file")
    assert "from-" not in repr(options)


def test_printed_configuration_is_a_file_that_says_the_same_and_hides_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, 'kv_memory = "2GiB"\nrefit_timeout = 9.5\nadmin_key = "s3cret"\ncors = ["https://a.b"]\n')
    monkeypatch.setenv("GTP_SERVE_CONFIG", str(path))
    monkeypatch.setenv("GTP_SERVE_MAX_RUNNING", "12")

    assert cli.main(["--ckpt", str(CKPT), "--no-graphs", "--tp=1", "--print-config"]) == 0

    told = capsys.readouterr().out
    assert "s3cret" not in told
    assert tomllib.loads(told) == {
        "ckpt": str(CKPT),
        "tp": 1,
        "kv_memory": "2GiB",
        "max_running": 12,
        "graphs": False,
        "admin_key": "...",
        "refit_timeout": 9.5,
        "cors": ["https://a.b"],
    }
    origins = {line.split("  # ")[0].split(" =")[0].strip("# "): line.split("  # ")[1] for line in lines_of(told)}
    assert origins["ckpt"] == origins["graphs"] == "command line"
    assert origins["max_running"] == "environment: GTP_SERVE_MAX_RUNNING"
    assert origins["kv_memory"] == str(path)
    assert origins["context"] == origins["dtype"] == origins["saved_gtp"] == "checkpoint"
    assert origins["host"] == "default"
    assert origins.keys() == {setting.key for setting in SETTINGS}


def lines_of(told: str) -> list[str]:
    return [line for line in told.splitlines() if "  # " in line]


def test_configuration_is_printed_also_where_the_checkpoint_cannot_be_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--ckpt", "/nowhere", "--print-config"]) == 0
    assert "# context" in capsys.readouterr().out
    assert cli.main(["--ckpt", "/nowhere", "--tp", "0", "--print-config"]) == 2


def test_the_page_tells_every_setting_as_the_help_does() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()

    settings = page.partition("\n## Several replicas")[0]
    rows = [row.split(" | ") for row in settings.splitlines() if row.startswith("| `")]
    assert [(row[0].strip("| `"), row[2].removesuffix(" |")) for row in rows] == [(s.key, s.words) for s in SETTINGS]
    example = page.partition("```toml\n")[2].partition("```")[0]
    assert tomllib.loads(example).keys() <= {setting.key for setting in SETTINGS}
