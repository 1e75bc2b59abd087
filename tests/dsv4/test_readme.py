"""What the README says is true: its examples run, its table is today's, its files and commands exist."""

import re
import runpy
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from dsv4.commands import support
from dsv4.runtime import dispatch
from dsv4_command import app
from softsm.cli import app as softsm_app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.M | re.S)
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "DESIGN.md",
    ROOT / "benchmarks" / "NOTES.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES = "".join(document.read_text() for document in DOCUMENTS)
CHECKED = "# count.py\n"  # the program that the README gives to softsm check
EXAMPLES = [("README.md", code) for language, code in BLOCKS if language == "python" and CHECKED not in code]
NEEDS_WEIGHTS = {"serving"}  # its code loads a model that a test does not have
EXAMPLES += [
    (str(document.relative_to(ROOT)), code)
    for document in sorted(
        [
            ROOT / "CONTRIBUTING.md",
            *(page for page in (ROOT / "docs").glob("*.md") if page.stem not in NEEDS_WEIGHTS),
            *(ROOT / "docs" / "api").glob("*.md"),
            ROOT / "packages" / "dsv4.md",
            ROOT / "packages" / "softsm" / "README.md",
        ]
    )
    for code in re.findall(r"^```python\n(.*?)^```$", document.read_text(), flags=re.M | re.S)
]
SHELL = "\n".join(code for language, code in BLOCKS if language == "sh")


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int, tmp_path: Path) -> None:
    """Run the example from a file, because Triton reads the source of a kernel there."""
    document, code = EXAMPLES[number]
    file = tmp_path / f"{Path(document).stem.lower()}_{number}.py"
    file.write_text(code)
    runpy.run_path(str(file))


def test_softsm_check_prints_the_report_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line but the addresses, which differ from run to run."""
    (tmp_path / "count.py").write_text(next(code for _, code in BLOCKS if code.startswith(CHECKED)))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(softsm_app, ["check", "--arch", "sm_90a", "count.py"])
    assert done.exit_code == 1, done.output

    def lines(text: str) -> list[str]:
        return re.sub(r"0x[0-9a-f]+", "ADDRESS", text).splitlines()

    (shown,) = (code for language, code in BLOCKS if language == "text")
    missing = set(lines(shown)) - set(lines(done.stdout)) - {"..."}
    assert not missing, done.stdout


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.skipif(
    (dispatch.triton_version() or (0, 0)) < (3, 9), reason="the sm_100 kernels can answer only with triton >= 3.9"
)
def test_support_matrix_is_up_to_date() -> None:
    assert support.replaced(README) == README, "run: dsv4 support --write README.md"


def test_the_table_of_machines_is_the_same_in_the_readme_and_on_the_install_page() -> None:
    tables = [
        re.findall(r"<!-- machines -->.*<!-- end of machines -->", text, flags=re.S)
        for text in (README, (ROOT / "docs" / "install.md").read_text())
    ]
    assert len(tables[0]) == 1 and tables[0] == tables[1]
    for (major, minor), entry in dispatch.ARCHITECTURES.items():
        assert re.search(rf"\| {entry.gpus} \((compute capability )?{major}\.{minor}\) \|", tables[0][0])


def test_support_refuses_a_file_without_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "other.md"
    file.write_text("no marks here\n")
    result = CliRunner().invoke(app, ["support", "--write", str(file)])
    assert result.exit_code != 0 and file.read_text() == "no marks here\n"


def test_support_prints_one_row_per_head_dim() -> None:
    out = CliRunner().invoke(app, ["support"]).stdout
    assert all(f"| head dim {d} |" in out for d in (64, 128, 256, 512))
    assert "bf16, fp16, fp32" in out


@pytest.mark.parametrize(
    "name",
    sorted(
        set(re.findall(r"`((?:src|docs|tests|tutorials|benchmarks|examples|tools|packages)/[\w./-]+)`", PAGES))
        | set(re.findall(r"\bpython ((?:tests|tutorials|benchmarks|examples|tools)/[\w/]+\.py)", PAGES))
    ),
)
def test_file_named_in_a_page_exists(name: str) -> None:
    assert (ROOT / name).exists()


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", document.read_text(), flags=re.S)  # code is not prose
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or document.parent.joinpath(target).exists(), target


def test_commands_in_the_readme_exist() -> None:
    for program, its in (("dsv4", app), ("softsm", softsm_app)):
        known = {command.name or command.callback.__name__ for command in its.registered_commands}
        named = set(re.findall(rf"^{program} (\w+)", SHELL, flags=re.M))
        assert named and named <= known
    targets = set(re.findall(r"^make (\w+)", SHELL, flags=re.M))
    makefile = (ROOT / "Makefile").read_text()
    assert targets and all(re.search(rf"^{target}:", makefile, flags=re.M) for target in targets)


@pytest.mark.parametrize("program, its", [("dsv4", app), ("softsm", softsm_app)])
def test_options_in_the_pages_exist(program: str, its: typer.Typer) -> None:
    """Of the commands in code, up to what goes to the program itself."""
    seen = 0
    for name, command in get_command(its).commands.items():
        options = {option for x in command.params for option in (*x.opts, *x.secondary_opts)} | {"--help"}
        for line in re.findall(rf"(?<![\w./-]){program} {name} ([^`\n#\"]*)", PAGES):
            named = set(re.findall(r"(?<!\S)--[a-z][\w-]*", line.split(" -- ")[0]))
            assert named <= options, f"{program} {name} {line}"
            seen += len(named)
    assert seen > 10
