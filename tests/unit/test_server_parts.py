from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from fakes_server import FakeClient, engine_config
from golden_file import same_as_golden

from gtp_serve.config import MoeConfig
from gtp_serve.errors import EngineFault, EnvironmentFault, NotReady, ShuttingDown
from gtp_serve.server.http_errors import Conflict, error_object, status_of
from gtp_serve.server.launch import Launch, first_prompt_ids, launch_argv, read_launch
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.options import SavedGrid
from gtp_serve.server.porch import Porch
from gtp_serve.server.ports import bind, display_address, find_user, url_of
from gtp_serve.server.state import ServerState, Serving


def ask(port: int, request: bytes = b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n") -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(request)
        answer = b""
        while chunk := client.recv(4096):
            answer += chunk
    return answer


def test_the_porch_answers_503_with_the_phase_and_leaves_later_clients_to_the_server() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        porch = Porch(listener)
        head, _, body = ask(port).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["phase"] == "import"
        assert set(json.loads(body)["error"]) == {"code", "message", "param", "did_you_mean", "type"}
        assert ask(port, b"HEAD /ready HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")
        porch.close()
        with socket.create_connection(("127.0.0.1", port), timeout=5) as waiting:
            accepted, _ = listener.accept()
            accepted.close()
            assert waiting.recv(1) == b""


def test_a_slow_or_broken_client_does_not_hold_the_porch() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        porch = Porch(listener)
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(b"GET /rea")
            assert ask(port).startswith(b"HTTP/1.1 503 ")
        porch.close()


def test_the_second_part_of_an_answer_does_not_wait_until_the_first_is_confirmed() -> None:
    """Whatever event loop serves: a client's kernel confirms after 40 ms, which every answer would take longer."""
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_taken_port_is_refused_with_who_has_it_and_a_free_one() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(EnvironmentFault) as caught:
            bind("127.0.0.1", port)
    details = dict(caught.value.details)
    assert (caught.value.code, caught.value.exit_code) == ("port-in-use", 5)
    assert details["used by"].startswith(f"pid {os.getpid()} (")
    assert str(port + 1 if port < 65535 else port - 1) in details["try"]


def test_an_address_that_does_not_exist_is_refused() -> None:
    for host in ("no.such.host.invalid", "203.0.113.1", "x" * 300):
        with pytest.raises(EnvironmentFault) as caught:
            bind(host, 0)
        assert caught.value.code == "bad-host"


def test_addresses_are_shown_as_a_client_writes_them() -> None:
    with bind("0.0.0.0", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert display_address("::1", 80) == "[::1]:80"
    assert display_address("10.0.0.1", 80) == "10.0.0.1:80"


def test_who_listens_is_read_from_the_process_table(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: 0100007F:{port:04X} 00000000:0000 {state} 0:0 0:0 0 0 0 {inode}\n"
    (tmp_path / "net").mkdir()
    lines = head + row.format(port=8000, state="01", inode=1) + row.format(port=8000, state="0A", inode=77)
    (tmp_path / "net" / "tcp").write_text(lines)
    for pid, inode in ((12, 5), (345, 77)):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
        (tmp_path / str(pid) / "cmdline").write_bytes(b"python\0train.py\0")
    assert find_user(8000, proc=tmp_path) == "pid 345 (python train.py)"
    assert find_user(8001, proc=tmp_path) == ""
    assert find_user(8000, proc=tmp_path / "none") == ""


def test_a_launch_survives_the_command_line() -> None:
    config = engine_config()
    moe = MoeConfig(num_experts=4, top_k=2, ffn_size=8)
    launch = Launch(
        ckpt="/a path/with 'quotes' and ü",
        iteration=3,
        saved=SavedGrid(tp=2, egtp=4),
        engine=replace(config, model=replace(config.model, moe=moe, eos_token_ids=(1, 2))),
        threads=2,
        first_prompt=(1, 2),
    )
    argv = launch_argv(launch)
    assert argv[1:-2] == [*["-O"] * (not __debug__), "-m", "gtp_serve.server.engine_start"]
    assert read_launch(argv[-1]) == launch
    assert launch_argv(launch, warnings=True)[-5:-3] == ["default", "-m"]


def test_the_first_prompt_exists_in_the_model() -> None:
    assert first_prompt_ids([5, 900, 6], 100, None) == (5, 6)
    assert first_prompt_ids([900], 100, 7) == (7,)
    assert first_prompt_ids([], 100, 700) == (0,)


def serving(client: FakeClient) -> Serving:
    return Serving(client=client, engine=engine_config(), tokenizer=None, name="x")


def test_o1_metric_names_and_labels_are_the_committed_ones() -> None:
    state = ServerState()
    metrics = Metrics(state)
    state.set_serving(serving(FakeClient()))
    metrics.ended("stop", 1.0)
    metrics.startup.labels("total").set(1)
    text = metrics.render().decode()
    names = sorted(line.split()[2] + " " + line.split()[3] for line in text.splitlines() if line.startswith("# TYPE"))
    same_as_golden("metrics.txt", "\n".join(names) + "\n")
    assert "_created" not in text


def test_the_state_answers_by_where_the_server_is() -> None:
    state, client = ServerState(clock=lambda: 5.0), FakeClient()
    with pytest.raises(NotReady):
        state.require_serving()
    assert state.status() == {"status": "starting", "phase": "starting", "seconds": 0.0}
    state.set_serving(serving(client))
    assert state.require_serving().client is client
    assert state.health() is None
    state.stopping = True
    with pytest.raises(ShuttingDown):
        state.require_serving()
    assert state.health() is None
    client.state = "dead"  # as it was asked to
    with pytest.raises(ShuttingDown):
        state.require_serving()
    state.stopping = False
    with pytest.raises(EngineFault):
        state.require_serving()
    assert state.health() == "the engine has ended"


def test_names_are_free_again_after_a_call_and_nothing_is_taken_by_a_refused_one() -> None:
    state = ServerState()
    with state.call(["a", "b"]):
        with pytest.raises(Conflict), state.call(["c", "b"]):
            pytest.fail("taken")
        with state.call(["c"]):
            assert state.num_calls == 2
    with state.call(["a", "b"]):
        assert state.num_calls == 1
    assert state.num_calls == 0


def test_only_refusals_say_what_was_wrong() -> None:
    assert error_object(NotReady("the server is starting"))["error"]["message"] == "the server is starting"
    for error in (EngineFault("/secret died"), ValueError("/secret")):
        assert "secret" not in json.dumps(error_object(error))
    assert [status_of(error) for error in (NotReady("x"), Conflict("x"), EngineFault("x"), ValueError())] == [
        503,
        409,
        503,
        500,
    ]
