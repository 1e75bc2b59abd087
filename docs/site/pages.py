"""A hook of mkdocs: pages that are generated, so that each says what the code says, and links between documents.

README, DESIGN, CHANGELOG, CONTRIBUTING, SECURITY, tutorials/README, benchmarks/NOTES     as pages of the site
diagnostics/    one page per code, from what `softsm explain CODE` prints
layouts         pictures of `softsm explain INSTRUCTION`
tutorials/      the prose and the code of each chapter
commands        every command with its options
report.html     a live report of softsm trace
plots           tables and plots of benchmarks/results/*.json
"""

import ast
import io
import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# page of the site -> the document in the repository that it shows
DOCUMENTS = {
    "index.md": "README.md",
    "design.md": "DESIGN.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "notes.md": "benchmarks/NOTES.md",
    "tutorials/index.md": "tutorials/README.md",
}
# Pages that a search lists before the many others that mention its words.
FIRST_FOUND = [
    f"{page}.md" for page in "install hardware environment troubleshooting sdpa training contributing faq".split()
]
FENCE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.M | re.S)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Addresses come from [project.urls]."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    config.repo_url, config.site_url = urls.get("Repository", ""), urls.get("Documentation", "")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, document in DOCUMENTS.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text()))
    for make in (diagnostics, layouts, tutorials, commands, plots):
        for name, content in make():
            files.append(File.generated(config, name, content=content))
    files.append(File.generated(config, "report.html", content=report()))
    for path in RESULTS.iterdir():
        if path.suffix in (".json", ".svg", ".txt"):
            files.append(File.generated(config, f"benchmarks/results/{path.name}", abs_src_path=str(path)))
    names = [file.src_uri for file in files.documentation_pages()]
    config.nav = filled(config.nav, names)
    return files


def filled(nav: Any, names: list[str]) -> Any:
    """The navigation, with every "folder/" as the pages of that folder."""
    if isinstance(nav, dict):
        return {title: filled(item, names) for title, item in nav.items()}
    if isinstance(nav, list):
        return [filled(item, names) for item in nav]
    inside = [name for name in names if nav.endswith("/") and name.startswith(nav)]
    return sorted(inside, key=lambda name: (not name.endswith("index.md"), name)) or nav


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Links that are right in the repository lead to the pages of the site."""
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
        title, dsv4, softsm, rest = markdown.split("\n\n", 3)
        markdown = f"{title}\n\n{first_screen(dsv4, softsm, rest)}\n{rest}"
    if here == "notes.md":  # the lab book would be the answer to most searches
        page.meta["search"] = {"exclude": True}
    if page.file.src_uri in FIRST_FOUND:
        page.meta["search"] = {"boost": 4}
    source = DOCUMENTS.get(here, f"docs/{here}")
    pages = {document: name for name, document in DOCUMENTS.items()}

    def lead(match: re.Match) -> str:
        target, anchor = match[1], match[2] or ""
        if "://" in target:
            return match[0]
        document = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        name = pages.get(document, document.removeprefix("docs/"))
        return f"]({posixpath.relpath(name, posixpath.dirname(here) or '.')}{anchor})"

    return "".join(part if part.startswith("`") else LINK.sub(lead, part) for part in FENCE.split(markdown))


def first_screen(dsv4: str, softsm: str, readme: str) -> str:
    """What each package is, a number and a report, all from the README, a timeline, and where to go on."""
    about = [re.sub(r"\*\*(\w+)\*\*", r"<strong>\1</strong>", paragraph) for paragraph in (dsv4, softsm)]
    assert all(text.startswith("<strong>") for text in about), "README.md does not begin with the two packages"
    row = re.search(r"^\| v4 decode fp8 \| (\d+) \| (\S+) \| (\S+) \| \S+ \| (\S+) \| (\S+) \|$", readme, flags=re.M)
    report = re.search(r"^```text\n.*?\n(race: .*?)\n.*?^```$", readme, flags=re.M | re.S)
    assert row and report, "README.md: the row of v4 decode fp8 or the report of a race is missing"
    cases, peer, slowest, median, fastest = row.groups()
    return f"""<div class="first-screen">
<div>
<p>{about[0]}</p>
<p class="number">{median}</p>
<p>the speed of {peer} in a DeepSeek-V4 decode step with FP8 rows: median of {cases} cases on an H200, from {slowest} to
{fastest}.</p>
<p><a class="md-button md-button--primary" href="install/">I have a Hopper GPU</a></p>
</div>
<div>
<p>{about[1]}</p>
<div class="language-text highlight"><pre><code>{report[1]}
  this   warp 0 of CTA (1, 0, 0) reads, count.py:9
  other  warp 0 of CTA (0, 0, 0) wrote, count.py:9
  fix: use atomics, or split the work into two launches</code></pre></div>
<p>Found without a GPU. <a href="report.html">Open a live report with its timeline</a>.</p>
<p><a class="md-button md-button--primary" href="softsm/">I write kernels</a></p>
</div>
<a class="timeline" href="report.html" title="Timeline of an attention kernel: which warp waits for which barrier"></a>
</div>
"""


# ---- softsm --------------------------------------------------------------------------------------------------------


def diagnostics() -> Iterator[tuple[str, str]]:
    from softsm.museum.judge import gather
    from softsm.report.codes import CODES

    exhibits = gather()
    rows = []
    for code, (sentence, advice) in CODES.items():
        rows.append(f"| [`{code}`]({code}.md) | {sentence} |")
        shown = [x for x in exhibits.values() if any(code in codes for codes in x.bugs.values())]
        museum = "".join(f"\n- {x.number}: {x.title}. `softsm museum --full {x.number}`" for x in shown)
        museum = f"\n\n## In the museum\n{museum}" if museum else ""
        yield f"diagnostics/{code}.md", f"# {code}\n\n{sentence}\n\n**Fix:** {advice}{museum}\n"
    table = "\n".join(rows)
    intro = "Each finding of softsm has one of these codes. `softsm explain CODE` prints the same text."
    yield "diagnostics/index.md", f"# Diagnostics\n\n{intro}\n\n| code | meaning |\n|---|---|\n{table}\n"


def report() -> str:
    """What `softsm trace` writes of the Gluon example on softsm's first page, without its wait."""
    text = (ROOT / "docs" / "softsm.md").read_text()
    (code,) = (x for x in re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S) if "tma.async_load" in x)
    kernel, _, rest = code.partition("\nwith softsm.use")
    launch = re.search(r"^    (copy\[.*WAIT=False\))$", rest, flags=re.M)
    assert launch, "docs/softsm.md: the Gluon example has no launch without its wait"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "missing_wait.py").write_text(f"{kernel}\n{launch[1]}\n")
        command = "-m softsm trace --arch sm_90a -o out missing_wait.py".split()
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)
        written = Path(folder) / "out" / "report.html"
        assert written.exists(), done.stdout + done.stderr
        return written.read_text()


def layouts() -> Iterator[tuple[str, str]]:
    from rich.console import Console

    from softsm.report.explain import EXAMPLES, Tile, explain

    parts = ["# Layouts\n\nDrawn by `softsm explain` from the tables that the emulator runs on."]
    for example in EXAMPLES:
        words = example.split()
        options = dict(zip((w.removeprefix("--") for w in words[2::2]), words[3::2]))
        tile = Tile(**{name: int(x) if name in ("rows", "k") else x for name, x in options.items()})
        console = Console(file=io.StringIO(), width=100)
        console.print(explain(words[0], words[1] if len(words) > 1 else "", tile))
        parts.append(f"## {words[0]}\n\n```sh\nsoftsm explain {example}\n```\n\n```text\n{console.file.getvalue()}```")
    yield "layouts.md", "\n\n".join(parts) + "\n"


TITLES = {"serve": "Serving, step by step", "train": "Training, step by step"}  # the others have their own


def tutorials() -> Iterator[tuple[str, str]]:
    folder = ROOT / "tutorials"
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()
        prose = ast.get_docstring(ast.parse(text)) or ""
        if path.name in ("read.py", "ladder.py"):
            continue
        code = text.split('"""', 2)[2].partition('\n\nif __name__ == "__main__":')[0].strip()
        run = f"read.py {int(path.name[:2])}" if path.name[0].isdigit() else path.name
        title = "" if prose.startswith("# ") else f"# {TITLES[path.stem]}\n\n"
        shell = f"```sh\npython tutorials/{run}\n```"
        yield f"tutorials/{path.stem}.md", f"{title}{prose}\n\n{shell}\n\n## The code\n\n```python\n{code}\n```\n"


def commands() -> Iterator[tuple[str, str]]:
    """Names, arguments and options, as the two programs know them."""
    from typer.main import get_command

    from dsv4_command import app as dsv4
    from softsm.cli import app as softsm

    parts = ["# Commands\n\nAlso `pytest --softsm`: see [Reports and commands](reports.md)."]
    for program, app in (("dsv4", dsv4), ("softsm", softsm)):
        parts.append(f"## {program}")
        for name, command in get_command(app).commands.items():
            about = re.sub(r"\s*\n\s*", " ", (command.help or "").strip())
            rows = []
            for parameter in command.params:
                if parameter.name == "help":
                    continue
                option = parameter.param_type_name == "option"
                shown = ", ".join(f"`{x}`" for x in parameter.opts) if option else f"`{parameter.name.upper()}`"
                default = parameter.default
                given = option and default not in (None, False, "", ()) and not callable(default)
                rows.append(f"| {shown} | {cell(parameter.help or '')} | {f'`{default}`' if given else ''} |")
            table = "| | | default |\n|---|---|---|\n" + "\n".join(rows)
            parts.append(f"### {program} {name}\n\n{about}" + (f"\n\n{table}" if rows else ""))
    yield "commands.md", "\n\n".join(parts) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# ---- benchmarks ----------------------------------------------------------------------------------------------------


def plots() -> Iterator[tuple[str, str]]:
    """Every record of `dsv4 bench --json`, as its own command would print and draw it."""
    from dsv4.bench import summary
    from dsv4.commands import bench

    parts = [
        "# Plots and tables",
        "From `benchmarks/results`. Every row compares calls of one run on one GPU. 1.00x is as fast as the best peer; "
        "less is slower.",
    ]
    for path in sorted(RESULTS.glob("*.json"), key=by_operation):
        record = json.loads(path.read_text())
        if not summary.is_record(record):
            continue
        parts.append(f"## {path.stem}\n\n`dsv4 bench --from benchmarks/results/{path.name}` prints this table.")
        if any(map(bench.has_peer, record["cases"])):
            name = f"plots/{path.stem}.svg"
            yield name, drawn(lambda file, record=record: bench.draw(record, file))
            parts.append(f"![Speed relative to the best peer]({name})")
        parts.append(bench.markdown(record))
    yield "plots.md", "\n\n".join(parts) + "\n"


OPERATIONS = ("dense", "decode", "varlen", "v4", "index", "moe", "backward")


def by_operation(path: Path) -> tuple[int, str]:
    """Sort key: attention first, gradients last."""
    return max((n for n, operation in enumerate(OPERATIONS) if operation in path.stem), default=0), path.stem


def drawn(draw: Callable[[Any], None]) -> str:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "savefig.format": "svg"}):
        file = io.StringIO()
        draw(file)
    return file.getvalue()
