"""The files of the page /ui over HTTP; tests/entrypoints/test_ui_browser.py looks at the page itself."""

from __future__ import annotations

import re

import pytest

from ascend_vllm.config.model import PoolerConfig
from tests.entrypoints.test_api_keys_http import Engine
from tests.scripted_engine import ScriptedEngine, client_of

POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


async def test_files_come_with_their_type_a_policy_and_a_tag() -> None:
    async with client_of(ScriptedEngine(["Hi"])) as http:
        page = await http.get("/ui")
        names = set(re.findall(r'"(ui/[\w.]+)"', page.text))
        assert {"ui/style.css", "ui/main.js", "ui/theme.js", "ui/icon.svg"} == names
        # what the scripts import
        modules = ["api", "chat", "dom", "engine", "markdown", "prometheus", "settings", "snippets", "tokens"]
        names |= {f"ui/{module}.js" for module in modules}
        types = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
        for name in sorted(names | {"ui"}):
            answer = await http.get(f"/{name}")
            assert answer.status_code == 200, name
            expected = types.get(name.rpartition(".")[2], "text/html; charset=utf-8")
            assert answer.headers["content-type"] == expected
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-content-type-options"] == "nosniff"
            tag = answer.headers["etag"]
            for known in (tag, f"W/{tag}", f'"other", {tag}'):
                again = await http.get(f"/{name}", headers={"If-None-Match": known})
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert (await http.get(f"/{name}", headers={"If-None-Match": '"other"'})).status_code == 200
        # relative addresses are meant from here
        redirected = await http.get("/ui/")
        assert (redirected.status_code, redirected.headers["location"]) == (307, "http://test/ui")
        for absent in ("nothing.js", "routes.py", "..%2froutes.py", "%2e%2e"):
            assert (await http.get(f"/ui/{absent}")).status_code == 404


async def test_the_page_has_no_scripts_or_styles_in_its_text() -> None:
    """The policy forbids them, and other hosts."""
    async with client_of(ScriptedEngine(["Hi"])) as http:
        text = (await http.get("/ui")).text
        assert re.findall(r"<script(?![^>]* src=)|<style| style=| on\w+=|javascript:|https?://", text) == []


async def test_a_flag_turns_the_page_off() -> None:
    async with client_of(ScriptedEngine(["Hi"]), disable_ui=True) as http:
        for path in ("/ui", "/ui/main.js", "/ui/server.json"):
            assert (await http.get(path)).status_code == 404


@pytest.mark.parametrize("flags", [{}, {"enable_auto_tool_choice": False, "tool_call_parser": None}])
async def test_the_page_is_told_what_the_server_can_do(flags: dict[str, bool]) -> None:
    async with client_of(ScriptedEngine(["Hi"]), **flags) as http:
        assert (await http.get("/ui/server.json")).json() == {
            "generates": True,
            "input_modalities": ["text"],
            "auto_tool_choice": not flags,
            "max_logprobs": 20,
            "max_model_len": 512,
        }


async def test_a_pooling_model_does_not_generate() -> None:
    async with client_of(Engine(PoolerConfig(task="embed", convert="embed"))) as http:
        assert (await http.get("/ui/server.json")).json()["generates"] is False


async def test_the_page_itself_needs_no_key() -> None:
    async with client_of(ScriptedEngine(["Hi"]), api_key=["sesame"]) as http:
        for path in ("/ui", "/ui/main.js", "/ui/style.css"):
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/ui/server.json")).status_code == 401
        headers = {"Authorization": "Bearer sesame"}
        assert (await http.get("/ui/server.json", headers=headers)).status_code == 200
