"""A headless browser for pages: what a reader sees, as a document, a picture, and whatever the page tried to do."""

import contextlib
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_MEASURED = """<!doctype html><link rel="icon" href="data:,">
<style>body{margin:0}iframe{border:0;width:WIDTHpx;height:4000px}</style>
<iframe src="PAGE"></iframe><pre id="measured"></pre><script>
document.querySelector("iframe").onload = function () {
  const page = this.contentDocument, root = page.documentElement, seen = getComputedStyle(page.body);
  const plots = [...page.querySelectorAll("svg")];
  document.getElementById("measured").textContent = JSON.stringify({
    width: root.clientWidth, needed: root.scrollWidth, ink: seen.color, paper: seen.backgroundColor,
    scripts: page.scripts.length, images: page.images.length, title: page.title, plots: plots.length,
    drawn: plots.every(plot => plot.getBoundingClientRect().height > 40),
    fetched: this.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name),
  });
};</script>"""
"""Shows the page in a frame of its server's and says how it turned out there."""


@dataclass
class Opened:
    """A page as the browser had it."""

    dom: str
    console: list[str]
    requests: list[str]
    """Paths that were asked of the server, the page itself among them."""
    measured: dict
    """Sizes and colours; empty where the page was not measured."""


def open_page(page: Path, *, dark: bool = False, width: int = 1280, picture: Path | None = None) -> Opened:
    """Open a page in a window ``width`` wide and say what came of it."""
    with _served(page.parent) as (address, requests), tempfile.TemporaryDirectory() as profile:
        frame = page.parent / f".{page.stem}.frame.html"  # a headless window is at least 500 wide, a frame is not
        frame.write_text(_MEASURED.replace("WIDTH", str(width)).replace("PAGE", page.name), encoding="utf-8")
        try:
            dom, said = _browse(f"{address}/{frame.name}", profile, dark=dark, width=max(width, 500))
            if picture:
                picture_of = frame if width < 500 else page
                _browse(f"{address}/{picture_of.name}", profile, dark=dark, width=width, picture=picture)
            alone, said_alone = _browse(f"{address}/{page.name}", profile, dark=dark, width=max(width, 500))
        finally:
            frame.unlink()
        measured = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.S)
        console = [line for line in (said + said_alone).splitlines() if ":CONSOLE:" in line]
        asked = [path for path in requests if path != f"/{frame.name}"]
        assert measured and measured[1], said
        return Opened(alone, console, asked, json.loads(html.unescape(measured[1])))


def _browse(address: str, profile: str, *, dark: bool, width: int, picture: Path | None = None) -> tuple[str, str]:
    ask = [f"--screenshot={picture}"] if picture else ["--dump-dom"]
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
        "--disable-background-networking", "--disable-component-update", "--no-first-run", "--enable-logging=stderr",
        f"--window-size={width},2400", f"--blink-settings=preferredColorScheme={0 if dark else 1}", *ask, address,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=True)
    return done.stdout, done.stderr


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    requests: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            requests.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
