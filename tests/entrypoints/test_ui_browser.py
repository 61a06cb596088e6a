"""The page /ui in a real Chromium, on real servers: what a reader sees, types and hears."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn

from ascend_vllm.args.tables.server import FrontendArgs
from ascend_vllm.config.speculation import SpeculativeConfig, SpeculativeMethod
from ascend_vllm.engine.metrics import EngineMetrics, StepStats
from ascend_vllm.entrypoints.openai.app import build_app
from ascend_vllm.entrypoints.openai.chat_tools import ChatParsers
from ascend_vllm.types.messages import DraftStats, SchedulerStats
from tests.browser import SHIFT, Browser, Page, needs_chromium
from tests.entrypoints.conftest import KEY, LONG_TOKENS
from tests.scripted_engine import CALL, ScriptedEngine
from tests.server import Server, metric, needs_curl, wait_until

pytestmark = needs_chromium

# the last answer is complete
ANSWERED = "document.querySelector('.message:last-child[data-role=assistant][aria-busy=false]') !== null"
WRITING = "document.querySelector('[aria-busy=true] .text')?.textContent.length > 20"
READY = "document.title.startsWith('tiny')"
LAST = ".message:last-child"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser, patient_server: Server) -> Iterator[Page]:
    """The page of `patient_server`; at the end it has neither complained nor asked another host."""
    with browser.open(f"{patient_server.url}/ui") as page:
        page.wait(READY)
        yield page
        check_requests(page, patient_server.url)


def check_requests(page: Page, url: str) -> None:
    assert page.problems == []
    assert [sent for _, sent, _ in page.requests if not sent.startswith((f"{url}/", "data:"))] == []


def ask(page: Page, text: str) -> None:
    page.fill("#draft", text)
    page.press("Enter")
    page.wait(ANSWERED)


def bodies(page: Page) -> list[dict[str, Any]]:
    """What was sent to the chat route."""
    return [json.loads(body) for _, url, body in page.requests if url.endswith("/v1/chat/completions")]


@contextlib.contextmanager
def scripted(engine: ScriptedEngine, root_path: str = "") -> Iterator[str]:
    """The address of the real application on an engine that writes what a test says."""
    args = FrontendArgs(enable_auto_tool_choice=True, tool_call_parser="hermes", root_path=root_path)
    app = build_app(engine, args, parsers=ChatParsers.from_flags(args, "qwen3"))  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    assert wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def test_a_chat_streams_and_is_stopped_edited_answered_again_and_cleared(page: Page, patient_server: Server) -> None:
    page.fill("#system", "Be brief.")
    page.fill("#sampling-temperature", "0")
    page.fill("#sampling-top_k", "5")
    page.fill("#stop-texts", "one\ntwo")
    ask(page, "Hello")
    assert page.text("[data-role=user] .body") == "Hello"
    answer = page.text(f"{LAST} .text")
    assert answer and "8 tokens" in page.text(f"{LAST} .note")
    assert page.js("document.getElementById('live').textContent").strip() == answer.strip()
    assert bodies(page) == [
        {
            "model": "tiny",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
            "temperature": 0,
            "top_k": 5,
            "stop": ["one", "two"],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    page.fill("#stop-texts", "")
    for name in ("max_tokens", "min_tokens"):
        page.fill(f"#sampling-{name}", str(LONG_TOKENS))
    page.fill("#draft", "Much")
    page.press("Enter")
    page.wait(WRITING)
    page.click("#stop")
    page.wait(ANSWERED)
    assert page.text(f"{LAST} .note") == "stopped" and len(page.text(f"{LAST} .text")) > 20
    with httpx.Client(base_url=patient_server.url) as http:
        assert wait_until(lambda: metric(http, "num_requests_running") == 0)
    assert page.js("document.activeElement.id") == "draft"
    # all of it is sent, the text that was stopped too
    for name in ("max_tokens", "min_tokens"):
        page.fill(f"#sampling-{name}", "4")
    page.click(f"{LAST} .actions button:nth-of-type(3)")
    page.wait(ANSWERED)
    assert "4 tokens" in page.text(f"{LAST} .note")
    assert [message["content"] for message in bodies(page)[-1]["messages"]] == ["Be brief.", "Hello", answer, "Much"]
    # what follows a message that is edited goes
    page.click(".message:first-child .actions button")
    page.fill(".edit-area", "Good day")
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.message').length === 2 && {ANSWERED}")
    assert [message["content"] for message in bodies(page)[-1]["messages"]] == ["Be brief.", "Good day"]
    page.click("#clear")
    assert page.js("document.querySelectorAll('.message').length") == 0
    assert page.text("#empty h2") == "Ask tiny"
    page.choose("#model", "alias")
    ask(page, "Another name")
    assert bodies(page)[-1]["model"] == "alias"


def test_tokens_show_their_alternatives_on_hover_and_on_focus(page: Page) -> None:
    page.click("#logprobs")
    page.fill("#top-logprobs", "3")
    ask(page, "Hello")
    assert page.js("document.querySelectorAll('.token').length") == 8
    assert page.js("document.getElementById('alternatives').hidden")
    shares = (
        "[...document.querySelectorAll('#alternatives .alternative-share')].map((one) => parseFloat(one.innerText))"
    )
    # the less likely a token, the more it is marked
    marked = page.js("getComputedStyle(document.querySelector('.level-4')).backgroundColor")
    assert marked.startswith("rgba(176, 106, 31, ")
    page.move_to(".token:nth-child(3)")
    assert "Token 3 of 8" in page.text("#alternatives")
    assert len(page.js(shares)) in (3, 4)
    page.move_to("#draft")
    page.wait("document.getElementById('alternatives').hidden")
    page.focus(".token")
    for key, position in (("ArrowRight", 2), ("End", 8), ("ArrowLeft", 7), ("Home", 1)):
        page.press(key)
        assert f"Token {position} of 8" in page.text("#alternatives")
        assert page.js("document.activeElement.getAttribute('aria-describedby')") == "alternatives"
        found = page.js(shares)
        assert found[:3] == sorted(found[:3], reverse=True) and sum(found) <= 100.2
        assert page.text("#alternatives .chosen") != ""
    page.press("Escape")
    assert page.js("document.getElementById('alternatives').hidden")
    # and back to the text
    page.click(f"{LAST} [aria-pressed]")
    assert page.js("document.querySelectorAll('.token').length") == 0


def test_answers_of_a_schema_a_regular_expression_and_a_choice(page: Page) -> None:
    page.click("#tab-output")
    page.choose("#output-kind", "choice")
    page.fill("#constraint", "red\ngreen\n")
    ask(page, "Which?")
    assert page.text(f"{LAST} .text") in ("red", "green")
    page.choose("#output-kind", "regex")
    page.fill("#constraint", "[ab]{3}")
    ask(page, "Which?")
    assert set(page.text(f"{LAST} .text")) <= {"a", "b"}
    page.choose("#output-kind", "json_schema")
    # what cannot be sent is told at its field, and not sent
    page.fill("#constraint", '{"type": ')
    assert "This is not JSON" in page.text("#constraint-error")
    sent = len(bodies(page))
    page.fill("#draft", "An object?")
    page.press("Enter")
    assert page.js("document.activeElement.id") == "constraint" and len(bodies(page)) == sent
    # a random model would write spaces until its end
    page.fill("#constraint", '{"enum": [{"a": true}, {"a": false}]}')
    page.click("#tab-sampling")
    page.fill("#sampling-max_tokens", "50")
    page.click("#send")
    page.wait(f"document.querySelectorAll('.message').length === 6 && {ANSWERED}")
    assert isinstance(json.loads(page.text(f"{LAST} .text"))["a"], bool)
    assert page.text(f"{LAST} .text").startswith('{\n  "a": ')


@needs_curl
def test_under_a_key_with_tools_and_as_code(browser: Browser, guarded_server: Server, tmp_path: pathlib.Path) -> None:
    """The key is asked for, a tool is called and its result given, and the request runs outside of the page."""
    with browser.open(f"{guarded_server.url}/ui") as page:
        page.wait("document.getElementById('key-dialog').open")
        page.type("wrong")
        page.press("Enter")
        page.wait("document.getElementById('key-error').innerText.includes('does not accept')")
        page.type(KEY)
        page.press("Enter")
        page.wait(READY)
        # of this tab alone
        assert page.js("[localStorage.length, document.cookie, location.href.includes('secret')]") == [0, "", False]
        page.goto(f"{guarded_server.url}/ui")
        page.wait(READY)

        page.fill("#sampling-max_tokens", "150")
        page.click("#tab-tools")
        page.click("#tools-example")
        tools = json.loads(page.js("document.getElementById('tools').value"))
        # a random model would write on in a free text
        tools[0]["function"]["parameters"]["properties"]["city"] = {"enum": ["Zürich", "Rome"]}
        page.fill("#tools", json.dumps(tools))
        page.choose("#tool-choice", "required")
        ask(page, "It's \"raining\", isn't it?\nIn Zürich \\ €?")
        assert page.text(".call-name") == "Calls get_weather"
        assert json.loads(page.text(".call pre"))["city"] in ("Zürich", "Rome")
        page.fill(".call textarea", "12 °C")
        page.click(".call-form .primary")
        page.wait(f"document.querySelectorAll('.message').length === 4 && {ANSWERED}")
        call, result = bodies(page)[-1]["messages"][-2:]
        assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "12 °C"}
        assert bodies(page)[-1]["tool_choice"] == "auto"
        assert page.js(f"document.querySelector('{LAST} .error').hidden")

        page.click("#tab-sampling")
        for name, value in {"temperature": "0.5", "min_p": "0.01", "seed": "7", "max_tokens": "9"}.items():
            page.fill(f"#sampling-{name}", value)
        page.click("#logprobs")
        page.click("#tab-code")
        curl = page.text("#code")
        page.click("[name=language][value=python] + span")
        python = page.text("#code")
        assert KEY not in curl + python
        page.click("#copy-code")
        page.wait("document.getElementById('copy-code').textContent === 'Copied'")
        check_requests(page, guarded_server.url)
    environment = os.environ | {"OPENAI_API_KEY": KEY}
    script = tmp_path / "request.py"
    script.write_text(python)
    for command in (["bash", "-c", curl + " -sS --fail-with-body"], [sys.executable, str(script)]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done
        answer = json.loads(done.stdout)
        assert answer["usage"]["completion_tokens"] <= 9
        assert answer["choices"][0]["logprobs"]["content"]


@needs_curl
def test_code_without_a_key(page: Page) -> None:
    page.click("#tab-code")
    page.fill("#draft", "It's a 'test' $HOME `id`")
    page.press("Escape")
    command = page.wait("document.getElementById('code').textContent")
    done = subprocess.run(["bash", "-c", f"{command} -sS"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout)["usage"]["completion_tokens"] == 8, done
    assert "Authorization" not in command


def test_the_engine_view_shows_the_metrics_while_it_is_seen(page: Page, patient_server: Server) -> None:
    with httpx.Client(base_url=patient_server.url) as http:
        for text in ("What the cache holds. " * 20, "What the cache holds. " * 20):
            body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 20}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert [url for _, url, _ in page.requests if url.endswith("/metrics")] == []
        page.click("#tab-engine")
        page.wait("document.querySelector('#tile-generation .tile-detail').innerText !== ''")
        generated, finished = (
            sum(float(line.split()[1]) for line in http.get("/metrics").text.splitlines() if line.startswith(name))
            for name in ("vllm:generation_tokens_total{", "vllm:request_success_total{")
        )
        assert f"{generated:,.0f} since start" in page.text("#tile-generation")
        assert f"{finished:,.0f} finished since start" in page.text("#tile-requests")
        assert "The prefix cache is off" in page.text("#tile-prefix")
        assert f"{metric(http, 'num_preemptions_total'):.0f} since start" in page.text("#tile-preemptions")
        assert page.js("document.getElementById('tile-drafts').hidden")
        page.click("[name=period][value=start] + span")
        row = page.text("[data-histogram='vllm:e2e_request_latency_seconds']").split()
        assert row[-1] == f"{metric(http, 'e2e_request_latency_seconds_count'):,.0f}" and "ms" in row

        # something runs, and takes part of the cache
        body |= {"max_tokens": LONG_TOKENS, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/chat/completions", json=body):
            page.wait("document.querySelector('#tile-requests .tile-value').innerText === '1'")
            page.wait("parseFloat(document.querySelector('#tile-cache .tile-value').innerText) > 0")
            page.wait("parseFloat(document.querySelector('#tile-generation .tile-value').innerText) > 0")
            assert page.js("document.querySelector('#tile-generation .line-0').getAttribute('d').length > 8")
        page.wait("document.querySelector('#tile-requests .tile-value').innerText === '0'")
    # it is read no more when it is paused, and when another view is there
    for act in ("#pause", "#tab-chat"):
        page.click(act)
        before = len(page.requests)
        # longer than a second: this is about what does not happen
        page.js("new Promise((done) => setTimeout(done, 1300))")
        assert len(page.requests) == before
        page.click("#pause" if act == "#pause" else "#tab-engine")
        assert wait_until(lambda before=before: len(page.requests) > before)


def test_the_engine_view_computes_rates_and_percentiles(browser: Browser) -> None:
    engine = ScriptedEngine(["Hi"])
    cache = msgspec.structs.replace(engine.config.cache, enable_prefix_caching=True)
    speculation = SpeculativeConfig(SpeculativeMethod.NGRAM, 2)
    metrics = EngineMetrics(msgspec.structs.replace(engine.config, cache=cache, speculation=speculation))
    engine.metrics = metrics.registry
    stats = SchedulerStats(2, 1, 0.25, 2, num_prefix_queries=100, num_prefix_hits=10)
    metrics.record(stats, StepStats(first_token_s=[2.0] * 10))
    with scripted(engine) as url, browser.open(f"{url}/ui") as page:
        value = "document.querySelector('#tile-{} .tile-value').innerText"
        page.click("#tab-engine")
        page.wait(f"{value.format('cache')} === '25 %'")
        assert [page.js(value.format(name)) for name in ("requests", "prefix", "preemptions")] == ["2", "–", "0"]
        assert "1 waiting" in page.text("#tile-requests") and "10 % since start" in page.text("#tile-prefix")
        # a rate is shown for a second
        page.js(
            """window.rates = [];
            new MutationObserver(() => rates.push(document.querySelector("#tile-generation .tile-value").innerText))
              .observe(document.getElementById("tile-generation"), { subtree: true, childList: true })"""
        )
        stats = SchedulerStats(0, 0, 0.0, 5, num_prefix_queries=150, num_prefix_hits=55)
        stats.drafts = DraftStats(2, 4, 3, [2, 1])
        metrics.record(stats, StepStats(first_token_s=[0.3] * 100, num_generation_tokens=5000))
        row = "[data-histogram='vllm:time_to_first_token_seconds']"
        page.wait(f"document.querySelector(`{row} td:last-child`).innerText === '100'")
        assert [page.js(value.format(name)) for name in ("prefix", "drafts", "first")] == ["90 %", "75 %", "375 ms"]
        assert page.js(value.format("preemptions")) == "3"
        assert any(1000 < float(rate.replace(",", "")) <= 5500 for rate in page.wait("rates.length && rates"))
        assert page.text(row).split("\t") == ["First token", "375 ms", "475 ms", "498 ms", "100"]
        page.click("[name=period][value=start] + span")
        assert page.text(row).split("\t")[-1] == "110"


def test_what_a_model_writes_is_text(browser: Browser) -> None:
    """Neither its HTML nor its addresses run; its thoughts are folded."""
    text = (
        '<img src=x onerror="window.bad=1"> **bold** and `a_b_c` and snake_case_name\n\n'
        "[web](https://example.com/a_b) [bad](javascript:window.bad=1)\n\n"
        "```html\n<script>window.bad = 1</script>\n```\n\n- one\n  - two\n\n| a | b |\n|---|---|\n| 1 | <b>2</b> |"
    )
    pieces = [
        "<think>",
        "First <i>this</i>.",
        "</think>",
        *(text[start : start + 7] for start in range(0, len(text), 7)),
    ]
    with scripted(ScriptedEngine(pieces)) as url, browser.open(f"{url}/ui") as page:
        page.wait(READY)
        ask(page, "<b>Hello</b>")
        assert page.text("[data-role=user] .body") == "<b>Hello</b>"
        shown = page.js(f"document.querySelector('{LAST} .text').innerHTML")
        assert "&lt;img src=x" in shown and "<img" not in shown and "<script" not in shown and "<b>" not in shown
        assert "<strong>bold</strong>" in shown and "<code>a_b_c</code>" in shown and "snake_case_name" in shown
        assert '<a href="https://example.com/a_b" rel="noopener noreferrer"' in shown
        assert "[bad](javascript:window.bad=1)" in page.text(f"{LAST} .text")
        assert "<ul><li>one<ul><li>two</li></ul></li></ul>" in shown and "<td>&lt;b&gt;2&lt;/b&gt;</td>" in shown
        assert page.js("window.bad === undefined")
        assert page.js(f"document.querySelector('{LAST} .thoughts').open") is False
        page.click(f"{LAST} .thoughts summary")
        assert page.text(f"{LAST} .thoughts-text") == "First <i>this</i>."
        check_requests(page, url)


def test_calls_that_the_model_chooses_and_a_prefix_of_a_proxy(browser: Browser) -> None:
    with scripted(ScriptedEngine(["I look. ", CALL]), "/llm") as url, browser.open(f"{url}/llm/ui") as page:
        page.wait(READY)
        page.click("#tab-tools")
        page.fill("#tools", '[{"type": "function", "function": {"name": "find"}}]')
        assert page.js("document.getElementById('tool-choice').value") == "auto"
        ask(page, "Find")
        assert page.text(f"{LAST} .text").strip() == "I look."
        assert json.loads(page.text(".call pre")) == {"text": 'a "b"', "count": 3}
        page.click("#tab-code")
        assert page.text("#code").startswith(f"curl {url}/llm/v1/chat/completions")
        check_requests(page, f"{url}/llm")


def test_images_of_a_message(page: Page) -> None:
    """No model of this version takes them, so their control is hidden; the server says so to who shows it."""
    assert page.js("document.getElementById('attach').hidden")
    page.js(
        """(() => {
          document.getElementById("attach").hidden = false;
          const given = new DataTransfer();
          for (const name of ["a.png", "b.png"]) given.items.add(new File([name], name, { type: "image/png" }));
          given.items.add(new File(["c"], "c.txt", { type: "text/plain" }));
          document.getElementById("file").files = given.files;
          document.getElementById("file").dispatchEvent(new Event("change"));
        })()"""
    )
    page.wait("document.querySelectorAll('#images img').length === 2")
    page.click("#images li:first-child button")
    ask(page, "What is this?")
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,Yi5wbmc="}}
    assert bodies(page)[-1]["messages"] == [
        {"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}
    ]
    assert page.text(f"{LAST} .error") == "tiny is not a multimodal model"
    assert page.js("document.querySelectorAll('.message img').length") == 1


def test_errors_are_sentences(browser: Browser) -> None:
    with contextlib.ExitStack() as server:
        url = server.enter_context(scripted(ScriptedEngine(["Hi"])))
        with browser.open(f"{url}/ui") as page:
            page.wait(READY)
            page.fill("#sampling-top_p", "7")
            ask(page, "Hello")
            assert page.text(f"{LAST} .error") == "top_p must be in (0, 1], got 7.0."
            page.fill("#sampling-top_p", "")
            page.click(f"{LAST} .actions button:nth-of-type(3)")
            page.wait(f"{ANSWERED} && document.querySelector('{LAST} .error').hidden")
            assert page.text(f"{LAST} .text") == "Hi"
            server.close()
            ask(page, "Still there?")
            assert page.text(f"{LAST} .error") == "The server cannot be reached. Is it still running?"
            assert page.problems == []


def test_a_keyboard_is_enough(page: Page) -> None:
    """Views, settings and messages are reached with Tab and the arrow keys, and what has the focus shows it."""
    assert page.js("document.activeElement.id") == "draft"
    page.type("Hello")
    page.press("Enter")
    page.wait(ANSWERED)
    reached = set()
    for _ in range(60):
        page.press("Tab", SHIFT)
        reached.add(page.js("document.activeElement.id || document.activeElement.className || 'body'"))
        if page.js("document.activeElement !== document.body"):
            assert page.js("getComputedStyle(document.activeElement).outlineStyle") != "none", page.js(
                "document.activeElement.outerHTML"
            )
    assert reached >= {"tab-chat", "theme", "model", "scroll", "clear", "toggle-panel", "tab-sampling", "system"}
    assert reached >= {"sampling-temperature", "logprobs", "skip"}
    page.focus("#tab-sampling")
    page.press("ArrowRight")
    assert page.js("[document.activeElement.id, document.getElementById('panel-output').hidden]") == [
        "tab-output",
        False,
    ]
    page.focus("#tab-chat")
    page.press("ArrowRight")
    page.wait("!document.getElementById('view-engine').hidden")
    roles = page.accessible()
    named = {"button", "textbox", "combobox", "checkbox", "radio", "tab", "image", "spinbutton", "link", "listbox"}
    assert [role for role, name in roles if role in named and not name.strip()] == []
    assert len([role for role, _ in roles if role == "tab"]) == 2
    page.press("ArrowLeft")
    assert [role for role, name in page.accessible() if role in named and not name.strip()] == []


def test_narrow_dark_and_still(page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.js(background)
    page.prefer(prefers_color_scheme="dark")
    dark = page.js(background)
    assert light != dark
    # nothing ever moves
    assert page.js("document.getAnimations().length") == 0
    page.click("#theme")
    assert page.js(background) == light and "light" in page.js("document.getElementById('theme').ariaLabel")
    page.click("#theme")
    page.prefer(prefers_color_scheme="light")
    assert page.js(background) == dark
    page.resize(360, 640)
    # of what is visible: something that is cut off would be neither reached nor scrolled to
    too_wide = """document.documentElement.scrollWidth > 360 ||
      [...document.querySelectorAll("button, input, select, textarea")].some(
        (one) => one.checkVisibility() && one.type !== "radio" && one.getBoundingClientRect().right > 360)"""
    # even with a key there is room for the list of models
    page.js("document.getElementById('open-key').hidden = false")
    assert page.js("document.getElementById('model').getBoundingClientRect().width") > 80
    # the settings give way to the conversation
    page.wait("!document.body.classList.contains('panel-open')")
    ask(page, "a" * 300)
    assert not page.js(too_wide)
    page.click("#toggle-panel")
    for tab in ("sampling", "output", "tools", "code"):
        page.click(f"#tab-{tab}")
        assert not page.js(too_wide), tab
    page.press("Escape")
    assert page.js("document.activeElement.id") == "toggle-panel"
    page.click("#tab-engine")
    page.wait("document.querySelector('#tile-generation .tile-detail').innerText !== ''")
    assert not page.js(too_wide)
