"""The documentation site: it builds without a warning, has a page for everything, and works in a browser."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import browser
import pytest

import dsv4
import softsm
from softsm.report.codes import CODES

ROOT = Path(__file__).parents[2]
PHONE = 390  # pixels


@pytest.fixture(scope="module")
def site() -> Path:
    """What `make docs` has just built. Building it takes longer than most tests: .ci/run does it first."""
    if built := os.environ.get("DSV4_SITE"):
        return ROOT / built
    if os.environ.get("DSV4_CI"):
        pytest.fail("DSV4_CI is set, but DSV4_SITE does not name a site to test")
    pytest.skip("there is no site to test: `make docs` builds it, DSV4_SITE=site names it, .ci/run does both")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        """A browser asks for an icon by itself, at any time, where a page (the live report) names none."""
        if self.path == "/favicon.ico":
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_diagnostic_has_a_page_with_the_text_of_explain(site: Path, code: str) -> None:
    page = (site / "diagnostics" / code / "index.html").read_text()
    assert code in page and CODES[code][0].split(",")[0].split(":")[0] in page


def test_generated_pages_are_there(site: Path) -> None:
    chapters = [path.stem for path in (ROOT / "tutorials").glob("[0-9]*.py")]
    assert len(chapters) >= 10
    for page in ("design", "changelog", "commands", "layouts", "plots", *(f"tutorials/{name}" for name in chapters)):
        assert (site / page / "index.html").is_file(), page
    assert 'id="dsv4.fmha.api.fmha"' in (site / "api" / "dsv4" / "index.html").read_text()
    assert "softmax_scale defaults to D" in (site / "api" / "dsv4" / "index.html").read_text()


@pytest.mark.parametrize("package", [dsv4, softsm], ids=["dsv4", "softsm"])
def test_every_exported_name_is_in_the_reference(package: ModuleType) -> None:
    page = (ROOT / "docs" / "api" / f"{package.__name__}.md").read_text()
    shown = set(re.findall(r"heading: (\S+)\}", page)) | set(re.findall(r"^::: (\S+)", page, flags=re.M))
    assert {f"{package.__name__}.{name}" for name in package.__all__} <= shown


PAGES = "- install/ dense/ api/dsv4/ diagnostics/race/ layouts/ plots/ isa/ tutorials/10_roles/".replace("-", "")


@pytest.mark.parametrize("page", PAGES.split(" "))
def test_no_page_complains_or_is_wider_than_a_phone(tab: browser.Browser, address: str, page: str) -> None:
    tab.open(f"{address}/{page}", width=PHONE)
    assert tab.value("document.querySelector('h1').innerText")
    assert tab.value("document.documentElement.scrollWidth") <= PHONE
    assert not tab.complaints


WIDE = 1400
FULL_PAGES = ["", *(f"{path.stem}/" for path in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("page", FULL_PAGES)
def test_no_code_is_cut_off_in_a_wide_window(tab: browser.Browser, address: str, page: str) -> None:
    tab.open(f"{address}/{page}", width=WIDE)
    cut = "[...document.querySelectorAll('pre > code')].filter(x => x.scrollWidth > x.clientWidth + 1)"
    assert not tab.value(f"{cut}.map(x => x.innerText.slice(0, 100))")


def test_the_first_screen_has_a_number_a_report_a_timeline_and_two_ways_on(tab: browser.Browser, address: str) -> None:
    tab.open(f"{address}/", width=WIDE)
    assert re.fullmatch(r"\d\.\d\dx", tab.value("document.querySelector('.first-screen .number').innerText"))
    assert tab.value("document.querySelector('.first-screen').getBoundingClientRect().bottom") < 800
    assert tab.value("document.querySelector('.first-screen .timeline').getBoundingClientRect().height") > 150
    for link in tab.value("[...document.querySelectorAll('.first-screen a')].map(a => a.href)"):
        tab.open(link)
        assert not [x for x in tab.complaints if "favicon" not in x] and tab.value("document.title")


def test_the_reference_has_types_and_examples_and_no_internals(site: Path) -> None:
    page = (site / "api" / "dsv4" / "index.html").read_text()
    assert "Tensor" in page and len(re.findall(r'id="dsv4[\w.]*"', page)) >= 20
    for name in ("wants_gradient", "Setting", "cut"):
        assert f'id="dsv4.distributed.{name}"' not in page
    assert "keywords: Any" not in re.sub(r"<.*?>", "", page)  # index_topk shows its keywords
    assert 'id="softsm.engine.launch.Kernel.pack"' not in (site / "api" / "softsm" / "index.html").read_text()


SEARCHES = {
    "deadlock": "diagnostics/deadlock/", "warmup": "graphs/", "SDPA": "sdpa/", "RTX 5090": "hardware/",
    "A100": "hardware/", "MI300X": "hardware/",
    "macOS": "hardware/", "B300": "hardware/", "contribute": "contributing/", "DSV4_AOT": "environment/",
    "SOFTSM_CACHE": "environment/", "deprecation": "stability/", "C compiler": "troubleshooting/",
    "illegal memory access": "troubleshooting/", "LSE base 2": "faq/",
}  # fmt: skip


@pytest.mark.parametrize(("words", "leads_to"), SEARCHES.items())
def test_search_finds(tab: browser.Browser, address: str, words: str, leads_to: str) -> None:
    tab.open(f"{address}/")
    tab.value(
        "box = document.querySelector('[data-md-component=search-query]'); box.focus();"
        f"box.value = {words!r}; box.dispatchEvent(new Event('keyup', {{bubbles: true}})); 0"
    )
    links = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    found = tab.until(f"({links}).length && {links}")
    assert any(f"{address}/{leads_to}" in link for link in found), found
    assert not tab.complaints
