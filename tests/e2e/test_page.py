"""The page in a real browser: with a scripted engine for what it shows, with a real one while weights change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import CHROMIUM, Browser, Page
from checkpoint_files import SMALL, random_tensors
from fakes_server import DATA, EOS, FakeClient, byte_ids, byte_tokenizer, serving
from serve_command import Command

from gtp_serve.layout.gtp import Grid
from gtp_serve.loaders.megatron_writer import write_checkpoint
from gtp_serve.refit.orders import UpdateRecord, WeightsStatus
from gtp_serve.request import Request
from gtp_serve.server.access import AdminGuard

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>{{7*7}}'
DONE = "!document.querySelector('#go').disabled"
READY = "document.querySelector('#status').textContent === 'ready'"
API_KEY, ADMIN_KEY = "an-api-key-for-a-test", "an-admin-key-for-a-test"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    running = Browser(tmp_path_factory.mktemp("profile"))
    try:
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def faked(client: FakeClient | None = None, **options: Any) -> Iterator[str]:
    """The URL of a server with a scripted engine, in a thread of its own."""
    up = threading.Event()
    found: dict[str, Any] = {}

    async def live() -> None:
        async with serving(client, **options) as server:
            found.update(url=server.url, loop=asyncio.get_running_loop(), stop=asyncio.Event())
            up.set()
            await found["stop"].wait()

    thread = threading.Thread(target=asyncio.run, args=(live(),))
    thread.start()
    assert up.wait(20)
    try:
        yield found["url"]
    finally:
        found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join(20)


def says(text: str, **fields: Any) -> FakeClient:
    return FakeClient(script=lambda request: [*byte_ids(text.encode()), EOS], **fields)


def shown(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def put(page: Page, field: str, value: str) -> None:
    page.run(f"document.querySelector({json.dumps(field)}).value = {json.dumps(value)}")


def opened(page: Page, url: str) -> None:
    page.open(url)
    page.wait(READY)


# -- what the headers promise, without a browser ---------------------------------------------------------


def test_page_and_viewer_are_served_with_their_policy() -> None:
    with faked() as url, httpx.Client(base_url=url, trust_env=False) as http:
        for path in ("/", "/docs"):
            reply = http.get(path)
            assert reply.status_code == 200
            assert reply.headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
        assert http.head("/").status_code == 200
        assert http.post("/").status_code == 405
        assert http.get("/stats").json()["status"] == "ready"
        assert http.get("/openapi.json").json()["paths"]["/stats"]


# -- what a reply looks like -----------------------------------------------------------------------------


def test_generate_shows_text_tokens_and_the_five_most_probable(browser: Browser) -> None:
    with faked(says("four, naïve 🙂\n")) as url, browser.page() as page:
        opened(page, url)
        page.click("#go")
        page.wait(DONE)

        # Half characters are put together again, and the end token is a token of its own.
        assert shown(page, ".toks").startswith("four, naïve 🙂\n")
        tokens = page.run("[...document.querySelectorAll('.t')].map((t) => t.className.split(' '))")
        assert len(tokens) == len("four, naïve 🙂\n".encode()) + 1
        assert all("s1" in one and "v0" in one for one in tokens)  # e^-0.5 each, one version
        assert "spec" in tokens[-1]
        page.hover(".t")
        tip = shown(page, "#tip")
        assert "logprob -0.500" in tip
        assert "weights 0" in tip
        assert page.run("document.querySelectorAll('#tip tr').length") == 5
        assert "18 tokens" in shown(page, "#said") or "tokens in" in shown(page, "#said")
        assert page.complaints() == []


def test_tokens_appear_while_the_reply_is_still_being_made(browser: Browser) -> None:
    with faked(says("a" * 400, delay=0.02)) as url, browser.page() as page:
        opened(page, url)
        put(page, "#max", "400")
        page.click("#go")
        page.wait("document.querySelectorAll('.t').length > 3")

        assert page.run("document.querySelector('#go').disabled")
        assert page.run("document.querySelectorAll('.t').length") < 400
        page.press("Escape")
        page.wait(DONE)
        assert shown(page, "#said") == "Stopped."


def test_what_a_model_writes_is_shown_and_not_run(browser: Browser) -> None:
    record = UpdateRecord(
        id="1", version=HOSTILE[:20], base="0", state="aborted", kind="disk", code="bad", message=HOSTILE
    )
    client = says(HOSTILE)
    client.weights = WeightsStatus(version="0", history=(record,))
    with faked(client) as url, browser.page() as page:
        opened(page, url)
        put(page, "#max", "200")
        page.click("#go8")
        page.wait(DONE)
        page.click("input[value=chat]")
        page.click("#go")
        page.wait(DONE)
        page.wait("document.querySelector('#log .why')")

        assert shown(page, ".toks").startswith(HOSTILE)
        assert HOSTILE in shown(page, ".turn:last-child")
        assert HOSTILE in shown(page, "#log .why")
        assert page.run("document.querySelectorAll('main img, main script, main iframe').length") == 0
        assert page.run("window.hacked") is None
        assert page.complaints() == []


def test_policy_stops_a_script_that_got_in_anyway(browser: Browser) -> None:
    with faked() as url, browser.page() as page:
        opened(page, url)
        refused = page.run(
            """(async () => {
                const seen = [], run = async (name, act) => { try { await act(); } catch (e) { seen.push(name); } };
                addEventListener("securitypolicyviolation", (e) => seen.push(e.effectiveDirective));
                await run("markup", () => { document.body.innerHTML += "<img src=x onerror='window.hacked=1'>"; });
                await run("script text", () => {
                    const s = document.createElement("script"); s.text = "window.hacked=1"; document.body.append(s); });
                await run("script in a node", () => { const s = document.createElement("script");
                    s.append("window.hacked=1"); document.body.append(s); });
                await run("style", () => { const s = document.createElement("style");
                    s.append("body{display:none}"); document.body.append(s); });
                await run("elsewhere", () => fetch("http://127.0.0.1:9/"));
                await run("image", () => new Promise((_, no) => {
                    const i = new Image(); i.onerror = no; i.src = "http://127.0.0.1:9/x.png"; }));
                await new Promise((yes) => setTimeout(yes, 200));
                return seen;
            })()"""
        )

        assert page.run("window.hacked") is None
        assert {"markup", "script text", "elsewhere", "image"} <= set(refused)
        assert {"connect-src", "img-src", "style-src-elem"} <= set(refused)
        assert page.run("getComputedStyle(document.body).display") == "block"


def test_errors_are_told_with_their_code_and_the_page_goes_on(browser: Browser) -> None:
    with faked(context=64) as url, browser.page() as page:
        opened(page, url)
        put(page, "#max", "500")
        page.click("#go")
        page.wait(DONE)
        assert "[prompt-too-long]" in shown(page, "#said")
        page.click("input[value=ids]")
        put(page, "#prompt", "1 two 3")
        page.click("#go")
        assert "token ids are whole numbers" in shown(page, "#said")
        put(page, "#prompt", "[72, 73,74]")
        put(page, "#max", "3")
        page.click("#go")
        page.wait("document.querySelectorAll('.t').length === 3")
        page.wait(DONE)
        assert shown(page, "#said").startswith("3 tokens in ")


def test_same_prompt_eight_times_comes_in_columns_with_a_summary(browser: Browser) -> None:
    def script(request: Request) -> list[int]:
        return byte_ids(b"x" * (2 + len(request.rid) % 3))

    with faked(FakeClient(script=script)) as url, browser.page(width=1400) as page:
        opened(page, url)
        page.click("#go8")
        page.wait(DONE)

        lefts = page.run("[...document.querySelectorAll('.col')].map((c) => Math.round(c.getBoundingClientRect().x))")
        assert len(lefts) == 8
        assert len(set(lefts)) >= 3
        said = shown(page, "#said")
        assert "8 of 8 at the limit" in said
        assert "different texts" in said


def test_chat_keeps_its_turns_until_a_new_one_begins(browser: Browser) -> None:
    client = says("Fine.")
    with faked(client) as url, browser.page() as page:
        opened(page, url)
        page.click("input[value=chat]")
        put(page, "#system", "Be brief.")
        for message in ("How are you?", "And now?"):
            put(page, "#prompt", message)
            page.click("#go")
            page.wait(DONE)

        prompt = byte_tokenizer().decode(list(client.requests[-1].input_ids), skip_special_tokens=False)
        places = [prompt.index(part) for part in ("Be brief.", "How are you?", "Fine.", "And now?")]
        assert places == sorted(places)
        assert page.run("document.querySelectorAll('.turn').length") == 4
        page.click("#fresh")
        assert page.run("document.querySelectorAll('.turn').length") == 0


def test_without_a_tokenizer_only_token_ids_are_offered(browser: Browser) -> None:
    with faked(tokenizer=None) as url, browser.page() as page:
        opened(page, url)
        page.wait("document.querySelector('input[value=text]').disabled")

        page.click("#go")
        page.wait(DONE)
        assert shown(page, ".toks").split() == ["1", "2"]  # the fake repeats 1 2 3, and 2 ends a sequence


@pytest.mark.parametrize(("button", "mode"), [("#python", "text"), ("#curl", "text"), ("#python", "chat")])
def test_copied_code_runs(browser: Browser, button: str, mode: str) -> None:
    if button == "#curl" and shutil.which("curl") is None:
        pytest.skip("no curl is installed")
    with faked(says('it\'s "four"\n')) as url, browser.page() as page:
        opened(page, url)
        page.click(f"input[value={mode}]")
        put(page, "#prompt", 'it\'s "2+2" $HOME `x` \\n')
        page.click(button)
        page.wait("/Copied|Selected/.test(document.querySelector('#said').textContent)")
        code = shown(page, "#code pre")

        command = [sys.executable, "-c", code] if button == "#python" else ["/bin/sh", "-c", code]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})

        body = json.loads(ran.stdout)
        text = body["text"] if mode == "text" else body["choices"][0]["message"]["content"]
        assert text == 'it\'s "four"\n'


# -- how it can be used ----------------------------------------------------------------------------------


def test_everything_can_be_done_with_the_keyboard_alone(browser: Browser) -> None:
    with faked(says("abc")) as url, browser.page() as page:
        opened(page, url)
        reached = []
        for _ in range(24):
            page.press("Tab")
            reached.append(page.run("document.activeElement.id || document.activeElement.tagName"))
            if reached[-1] == "prompt":
                break
        assert reached[0] == "A"  # the link to the playground comes first
        page.type("Hello")
        page.press("Enter", "Control")
        page.wait(DONE)
        for _ in range(24):
            page.press("Tab")
            reached.append(page.run("document.activeElement.id || document.activeElement.className"))
            if reached[-1].startswith("t "):
                break
        assert {"go", "go8", "curl", "python", "max", "temp", "topp", "topk", "seed", "stop"} <= set(reached)
        page.press("ArrowRight")
        assert page.run("document.activeElement.textContent") == "b"
        assert not page.run("document.querySelector('#tip').hidden")
        assert page.run("document.activeElement.getAttribute('aria-describedby')") == "tip"
        outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        page.press("End")
        assert "im_end" in shown(page, "#tip") or "spec" in page.run("document.activeElement.className")
        page.press("Escape")
        assert page.run("document.querySelector('#tip').hidden")


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_no_width_scrolls_sideways(browser: Browser, width: int) -> None:
    long = "w" * 300 + " " + "ab " * 50
    record = UpdateRecord(id="1", version="v" * 128, base="0", state="aborted", kind="disk", message="m" * 300)
    client = says(long)
    client.weights = WeightsStatus(version="v" * 100, history=(record,))
    with faked(client) as url, browser.page(width=width, height=740) as page:
        opened(page, url)
        put(page, "#max", "400")
        page.click("#go8")
        page.wait(DONE)
        page.click("#python")
        page.wait("document.querySelector('#log .why')")

        assert page.run("document.documentElement.scrollWidth") <= width
        page.open(f"{url}/docs")
        page.wait("document.querySelectorAll('.op').length > 10")
        page.click(".op summary")
        page.wait("document.querySelector('.op button')")
        assert page.run("document.documentElement.scrollWidth") <= width


CONTRASTS = """(() => {
    const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
        .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const over = ([r, g, b, a = 1], under) => [r, g, b].map((v, i) => v * a + under[i] * (1 - a));
    const ground = (node) => {
        if (!node) return [255, 255, 255];
        const own = parse(getComputedStyle(node).backgroundColor);
        return own.length === 4 && own[3] === 0 ? ground(node.parentElement) : over(own, ground(node.parentElement));
    };
    return [...document.querySelectorAll("h1, h2, .soft, .pill, .t, button:enabled, dt, dd, a, label, .err, .why")]
        .filter((node) => node.checkVisibility() && node.textContent.trim())
        .map((node) => {
            const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x);
            return [(a + 0.05) / (b + 0.05), node.textContent.slice(0, 30), node.className];
        });
})()"""


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (360, False)])
def test_requests_by_version_show_how_many_are_behind(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    client = says("ab")
    client.made_by = lambda request, index: {1: "7", 2: "8", 3: "9"}.get(request.sampling.seed or 0, "78"[index > 0])
    client.weights = WeightsStatus(version="9")
    with faked(client) as url, browser.page(width=width, dark=dark) as page:
        opened(page, url)
        page.wait("document.querySelector('#sharesaid').textContent.includes('none ended')")
        assert page.run("document.querySelector('#share').hidden")
        with httpx.Client(base_url=url, trust_env=False) as http:
            for seed in (1, 2, 2, 3, 3, 3, 4):
                http.post(
                    "/generate", json={"text": "a", "sampling_params": {"sampling_seed": seed}}
                ).raise_for_status()
            by_version = http.get("/stats").json()["requests_by_version"]["versions"]
        assert {one["version"]: (one["requests"], one["mixed"]) for one in by_version} == {
            "8": (2, 0),
            "9": (3, 0),
            "7": (2, 1),
        }
        page.wait("document.querySelectorAll('#share span').length === 3")
        assert shown(page, "#sharesaid") == "(7 ended, 57% not of the live weights, 1 mixed)"
        assert shown(page, "#sharekey") == "8: 2live 9: 37: 2"
        widths = page.run(
            "[...document.querySelectorAll('#share span')].map((one) => one.getBoundingClientRect().width)"
        )
        assert widths[1] / widths[0] == pytest.approx(1.5, rel=0.05)
        colours = page.run(
            "[...document.querySelectorAll('#share span')].map((s) => getComputedStyle(s).backgroundColor)"
        )
        assert len(set(colours)) == 3
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.complaints() == []
        page.run("document.querySelector('#live').scrollIntoView()")
        page.screenshot(Path(os.environ.get("PAGE_SHOTS", tmp_path)) / f"share-{width}-{dark}.png")


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_both_colour_schemes(browser: Browser, tmp_path: Path, dark: bool) -> None:
    record = UpdateRecord(id="1", version="1", base="0", state="aborted", kind="disk", message="too short")
    client = says("unlikely words", logprob=-9.0)
    client.weights = WeightsStatus(version="0", history=(record,))
    with faked(client) as url, browser.page(dark=dark) as page:
        opened(page, url)
        page.click("#go")
        page.wait(DONE)
        page.wait("document.querySelector('#log .why')")
        page.screenshot(tmp_path / "page.png")

        ground = page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(ground) < 60) if dark else (min(ground) > 200)
        contrasts = page.run(CONTRASTS)
        assert len(contrasts) > 40
        assert [one for one in contrasts if one[0] < 4.5] == []
        assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_moves_for_who_asked_for_that(browser: Browser) -> None:
    moving = "getComputedStyle(document.querySelector('.going'), '::after').animationName"
    with faked(says("a", hold=True)) as url, browser.page() as page:
        opened(page, url)
        page.click("#go")
        page.wait("document.querySelector('.going')")
        assert page.run(moving) == "b"
        page.media(reduced_motion=True)
        assert page.run(moving) == "none"


def test_api_viewer_shows_every_route_and_sends_a_request(browser: Browser) -> None:
    with faked(says("four")) as url, browser.page() as page:
        page.open(f"{url}/docs")
        page.wait("document.querySelectorAll('.op').length > 10")
        paths = httpx.get(f"{url}/openapi.json", trust_env=False).json()["paths"]

        assert page.run("document.querySelectorAll('.op').length") == sum(len(verbs) for verbs in paths.values())
        page.click(".op summary")
        page.wait("document.querySelector('.op[open] button.main')")
        assert "sampling_params" in shown(page, ".op[open] .fields")
        page.click(".op[open] button.main")
        page.wait("document.querySelector('.op[open] pre').textContent.startsWith('200')")
        assert '"text": "four"' in shown(page, ".op[open] pre")
        put(page, "#find", "detok")
        page.run("document.querySelector('#find').dispatchEvent(new Event('input'))")
        visible = page.run("[...document.querySelectorAll('.op:not([hidden]) code')].map((c) => c.textContent)")
        assert set(visible) == {"/detokenize", "/v1/detokenize"}
        assert page.complaints() == []


def test_history_asks_for_the_admin_key_and_keeps_it_in_memory_only(browser: Browser) -> None:
    client = FakeClient()
    client.weights = WeightsStatus(
        version="1", history=(UpdateRecord(id="1", version="1", base="0", state="committed", kind="disk"),)
    )
    with faked(client, guard=AdminGuard(ADMIN_KEY)) as url, browser.page() as page:
        opened(page, url)
        page.wait("document.querySelector('#wsaid').textContent.includes('admin key is missing')")
        assert page.run("document.querySelector('#keys').open")
        put(page, "#adminkey", ADMIN_KEY)
        page.click("#keyform button")
        page.wait("document.querySelectorAll('#log li').length === 1")

        assert ADMIN_KEY not in page.run("document.documentElement.outerHTML")
        assert page.run("[localStorage.length, sessionStorage.length, document.cookie, location.href]") == [
            *(0, 0, "", f"{url}/")
        ]
        assert page.run("document.querySelector('#adminkey').value") == ""


# -- with a real engine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Path]]]:
    """(URL, checkpoint folders) of a real server with both keys; its model never ends a text by itself."""
    root = tmp_path_factory.mktemp("page")
    config = replace(SMALL, vocab_size=251, vocab_rows=252, max_context=4096, dtype="float32")
    folders = {}
    for seed, name in enumerate(("a", "b", "other")):
        made = replace(config, hidden_size=32, head_dim=8) if name == "other" else config
        tensors = random_tensors(made, seed)
        tensors["lm_head.weight"][:3] = 0.0  # no special token is ever the likeliest
        folders[name] = write_checkpoint(root / name, made, tensors, Grid(gtp=4, alignment=32), iteration=100)
    words = ("--tokenizer", str(DATA / "tokenizer251"), "--port", "0", "--api-key", API_KEY, "--admin-key", ADMIN_KEY)
    command = Command("--ckpt", str(root / "a"), *words)
    try:
        yield command.url(), folders
    finally:
        command.stop()


def test_pages_need_no_key_and_what_they_show_does(server: tuple[str, dict[str, Path]]) -> None:
    with httpx.Client(base_url=server[0], trust_env=False) as http:
        open_to_all = [http.get(path).status_code for path in ("/", "/docs", "/icon.svg")]
        behind_the_key = [http.get(path).status_code for path in ("/stats", "/checkpoint", "/openapi.json", "/weights")]

    assert (open_to_all, behind_the_key) == ([200] * 3, [401] * 4)


def test_new_weights_are_seen_in_the_middle_of_a_reply(browser: Browser, server: tuple[str, dict[str, Path]]) -> None:
    url, folders = server
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with browser.page() as page, httpx.Client(base_url=url, trust_env=False, headers=headers, timeout=60) as http:

        def push(version: str, name: str) -> int:
            source = {"kind": "disk", "path": str(folders[name])}
            return http.post("/weights/updates", json={"version": version, "source": source, "wait": True}).status_code

        page.open(url)
        page.wait("document.querySelector('#keys').open")
        put(page, "#apikey", API_KEY)
        put(page, "#adminkey", ADMIN_KEY)
        page.click("#keyform button")
        page.wait(READY)
        page.wait("document.querySelector('#version').textContent === '0'")
        put(page, "#max", "3000")
        put(page, "#temp", "0")
        page.click("#go")
        page.wait("document.querySelectorAll('.t.v0').length > 3")
        assert push("200", "b") == 200
        page.wait("document.querySelectorAll('.t.v1').length > 3")
        assert push("300", "other") == 422
        page.wait("document.querySelector('#log .why')")
        page.press("Escape")
        page.wait(DONE)

        kinds = page.run("[...document.querySelectorAll('.t')].map((t) => t.token.version)")
        assert kinds == sorted(kinds)
        assert set(kinds) == {"0", "200"}
        assert "weights 0" in shown(page, "#legend")
        assert "weights 200" in shown(page, "#legend")
        page.wait("document.querySelector('#version').textContent === '200'")
        assert page.run("[...document.querySelectorAll('#log li b')].map((b) => b.textContent.trim())") == [
            "200 → 300",
            "0 → 200",
        ]
        assert "[other-model]" in shown(page, "#log .why")
        assert page.run("document.querySelectorAll('#line path.aborted').length") == 1
        # Requests that were refused before the keys were given are in the console; nothing else may be.
        assert [one for one in page.complaints() if "401" not in one] == []


def test_checkpoint_and_live_numbers_are_drawn(browser: Browser, server: tuple[str, dict[str, Path]]) -> None:
    with browser.page() as page:
        page.open(server[0])
        put(page, "#apikey", API_KEY)
        page.run("document.querySelector('#keyform').requestSubmit()")
        page.wait("document.querySelectorAll('#pics figure').length > 3")

        facts = shown(page, "#facts")
        assert "TP1 GTP4" in facts
        assert "251 + 1 padding rows" in facts
        assert page.run("document.querySelectorAll('#pics rect.pad title').length") > 4
        assert "padding rows" in page.run("document.querySelector('#pics figure > svg').getAttribute('aria-label')")
        page.click("#go")
        page.wait(DONE)
        page.wait("document.querySelector('#nums dd').textContent !== '\\u2013'")
        time.sleep(1.1)
        points = page.run("document.querySelector('#nums polyline').getAttribute('points').split(' ').length")
        assert points >= 2
