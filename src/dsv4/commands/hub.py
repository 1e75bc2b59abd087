"""`dsv4 hub --out DIR` writes the attention of dsv4 as a kernel of the Hugging Face hub, `build/torch-universal`.

The hub loads a folder as a module with its own name, in a process that may have other builds and an installed dsv4. So
`dsv4 hub` copies the modules that attention needs, and replaces the package name `dsv4` in them (imports, module names
in strings, the namespace of torch operators) by the build's own name. A build needs nothing but torch and Triton.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from pathlib import Path

from rich.console import Console

from dsv4_command import usage

PACKAGE = Path(__file__).parents[1]
# Modules that are copied, with all that they import; kernels and CPU paths are imported by name when needed.
ROOTS = ("__init__", "integrations.flash_attn", "integrations.flash_mla", "fmha.cpu", "v4.cpu", "index.cpu")
DYNAMIC = ("kernels", "fmha/kernels", "v4/kernels", "index/kernels", "compress/kernels")
TAKEN_FOR_GRANTED = {"torch", "triton"}
LAZY = {"softsm"}  # inside functions: backend="softsm" works where softsm is installed
EXPORTS = """
from dsv4.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dsv4.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

__all__ += [
    "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata",
]
"""


def hub(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        usage.refuse(f"--out: got {out}, which is not empty; accepted: a new or an empty folder")
    name, folder, modules = write(out)
    Console().print(f"{len(modules)} modules as {name} in {folder}")


def write(out: Path) -> tuple[str, Path, list[str]]:
    """Write a build; return (its module name, its folder, the modules in it)."""
    modules = needed()
    texts = {m: path_of(m).read_text() for m in modules}
    texts["__init__"] += EXPORTS
    digest = hashlib.sha256("".join(m + texts[m] for m in modules).encode()).hexdigest()[:10]
    name = f"dsv4_{digest}"
    folder = out / "build" / "torch-universal"
    for module in modules:
        target = folder / path_of(module).relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(renamed(texts[module], name))
    (folder / "metadata.json").write_text(json.dumps(metadata(name), indent=2) + "\n")
    return name, folder, modules


def metadata(name: str) -> dict:
    """Return the metadata that the hub requires of a build. `cpu` is the type of a build that runs anywhere; GPUs are
    found at the call."""
    return {
        "name": "dsv4",
        "id": name,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }


def needed() -> list[str]:
    """Return the modules of dsv4 that attention imports, as dotted names below the package, packages first."""
    found: set[str] = set()
    waiting = [*ROOTS, *(m for top in DYNAMIC for m in below(top))]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        parents = module.split(".")[:-1]
        waiting += [f"{'.'.join(parents[:n])}.__init__" for n in range(1, len(parents) + 1)]
        waiting += imports(module)
    return sorted(found)


def below(top: str) -> list[str]:
    """Return every module of a folder."""
    return [".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in sorted((PACKAGE / top).rglob("*.py"))]


def imports(module: str) -> list[str]:
    """Return the modules of dsv4 that one imports anywhere; ImportError where it needs a package that the hub lacks."""
    found = []
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        names: list[tuple[str, str | None]] = []
        if isinstance(node, ast.Import):
            names = [(a.name, None) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [(node.module, a.name) for a in node.names]
        for source, attribute in names:
            top, _, rest = source.partition(".")
            if top == "dsv4":
                whole = f"{rest}.{attribute}" if rest and attribute else attribute or rest
                found += [m for m in (whole, rest, f"{rest}.__init__") if m and path_of(m).exists()][:1]
            elif top not in TAKEN_FOR_GRANTED | LAZY and top not in sys.stdlib_module_names:
                raise ImportError(f"dsv4.{module} imports {top}, which a kernel of the hub cannot import")
    return found


def path_of(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def renamed(text: str, name: str) -> str:
    """Return the package under another name: in imports, in strings that name modules, and in torch's namespace."""
    tops = "|".join(sorted({p.stem for p in PACKAGE.iterdir() if not p.stem.startswith("__")}))
    text = re.sub(r"(?m)^(\s*(?:from|import) )dsv4\b", rf"\1{name}", text)
    text = re.sub(rf"(?<=[\"'])dsv4(?=\.(?:(?:{tops})\.|\{{))", name, text)
    text = re.sub(r"torch\.ops\.dsv4\b", f"torch.ops.{name}", text)
    text = re.sub(r"(?<=[\"'])dsv4(?=::)", name, text)
    return re.sub(r"Library\(\"dsv4\"", f'Library("{name}"', text)
