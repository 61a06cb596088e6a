"""Takes the pictures of docs/images again, of the page /ui of a server that has just started with the demo model.

    ascend-vllm serve demo --enable-prefix-caching --num-gpu-blocks-override 128 &
    python scripts/make_screenshots.py http://localhost:8000

It needs Debian's `chromium`, and takes about a minute.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import httpx

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
IMAGES = ROOT / "docs" / "images"
COMPLETE = "document.querySelector('.message:last-child[data-role=assistant][aria-busy=false]') !== null"
# the place of the first word of several letters that the model was not sure of
UNSURE_TOKEN = """
1 + [...document.querySelectorAll('.token')].findIndex(
  (token, i) => i > 3 && /level-[23]/.test(token.className) && token.textContent.length > 3)
"""


def main(server: str) -> None:
    """Chats with the server in a browser and writes ui-*.png.

    Args:
        server: its address.
    """
    from tests.browser import Browser, Page

    def ask(page: Page, question: str) -> None:
        page.fill("#draft", question)
        page.press("Enter")
        page.wait(COMPLETE)

    def set_sampling(page: Page, **values: str) -> None:
        for name, value in values.items():
            page.fill(f"#sampling-{name}", value)

    with tempfile.TemporaryDirectory() as directory, contextlib.closing(Browser(pathlib.Path(directory))) as browser:
        with browser.open(f"{server}/ui", 1200, 680) as page:
            page.wait("document.title.startsWith('demo')")
            set_sampling(page, temperature="0", max_tokens="200")
            ask(page, "What does --block-size do?")
            page.screenshot(IMAGES / "ui-chat.png")
            page.click("#clear")
            page.click("#logprobs")
            ask(page, "How is memory shared between the weights and the KV cache?")
            page.move_to(f".token:nth-child({page.js(UNSURE_TOKEN) or 1})")
            page.screenshot(IMAGES / "ui-tokens.png")
            page.click("#logprobs")
            page.click("#clear")
            page.resize(360, 640)
            page.wait("!document.body.classList.contains('panel-open')")
            page.prefer(prefers_color_scheme="dark")
            ask(page, "What does --block-size do?")
            page.screenshot(IMAGES / "ui-narrow.png")
        with browser.open(f"{server}/ui", 1280, 800) as page, _load(server):
            page.click("#tab-engine")
            time.sleep(40)
            page.wait("Number(document.querySelector('#tile-requests .tile-value').innerText) >= 3")
            page.screenshot(IMAGES / "ui-engine.png")


@contextlib.contextmanager
def _load(server: str, num_clients: int = 7) -> Iterator[None]:
    """More and more clients that chat, until the block ends."""
    stop = threading.Event()

    def chat(first: int) -> None:
        system = {"role": "system", "content": "You answer questions about flags of the server, briefly. " * 3}
        with httpx.Client(timeout=60) as client:
            stop.wait(first * 3)
            number = first
            while not stop.wait(0.3 * (number % 4)):
                question = {"role": "user", "content": f"What does --max-num-seqs do? {number}"}
                body = {"messages": [system, question], "ignore_eos": True, "max_tokens": 100 + 60 * (number % 6)}
                client.post(f"{server}/v1/chat/completions", json={"model": "demo"} | body).raise_for_status()
                number += 1

    threads = [threading.Thread(target=chat, args=(first,)) for first in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
