"""The import table of docs/architecture.md, enforced."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "truespec"

EVERYWHERE = {"core", "params", "config", "env", "utils"}
TENSORS = EVERYWHERE | {"batch"}
ALLOWED: dict[str, set[str]] = {
    "utils": set(),
    "env": set(),
    "params": {"utils", "env"},
    "config": {"utils", "env", "params"},
    "core": {"utils", "env", "params"},
    "message": {"utils", "env", "params", "core"},
    "batch": {"utils", "env", "params", "core"},
    "constrained": EVERYWHERE,
    "kernels": {"env"},
    "kvcache": TENSORS | {"kernels"},
    "layers": TENSORS | {"kernels"},
    "models": TENSORS | {"layers", "kernels"},
    "engine": TENSORS | {"kernels", "kvcache", "layers", "models"},
    "speculative": TENSORS | {"engine", "layers", "models", "kernels", "kvcache", "constrained"},
    "scheduler": TENSORS
    | {"message", "kvcache", "constrained", "engine.worker", "speculative.registry"},
    "tokenizer": EVERYWHERE | {"message"},
    "server": EVERYWHERE | {"message", "tokenizer", "constrained"},
    "training": TENSORS | {"llm", "models", "layers", "kernels"},
    "audit": TENSORS | {"llm", "models", "layers"},
    "bench": TENSORS | {"llm", "models", "layers"},
}
COMPOSITION_ROOTS = {
    "llm.py",
    "convert.py",
    "server/launch.py",
    "server/engine_process.py",  # what launch.py spawns
    "__init__.py",
    "__main__.py",
    "launch_server.py",
}
KERNEL_LIBRARIES = {"torch", "triton", "numba", "llvmlite", "numpy"}


def imported(path: Path) -> list[str]:
    """Names of our modules that a file imports, without the package's name."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            base = node.module
            names += [f"{base}.{a.name}" for a in node.names] if base == "truespec" else [base]
        elif isinstance(node, ast.ImportFrom):
            depth = len(path.relative_to(PACKAGE).parts) - 1
            assert node.level <= max(depth, 1), f"{path}: across rooms import absolutely"
    return [n.removeprefix("truespec.") for n in names if n.startswith("truespec.")]


def files() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_a_room_imports_only_what_the_table_allows(path):
    relative = path.relative_to(PACKAGE)
    room = relative.parts[0].removesuffix(".py")
    if relative.as_posix() in COMPOSITION_ROOTS:
        return
    allowed = ALLOWED[room] | {room}
    for name in imported(path):
        parts = name.split(".")
        prefixes = {".".join(parts[: i + 1]) for i in range(len(parts))}
        assert prefixes & allowed, f"{relative} imports {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").rglob("*.py")), ids=lambda p: p.name)
def test_kernels_import_tensor_libraries_only(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in names:
            top = name.split(".")[0]
            assert top in KERNEL_LIBRARIES | sys.stdlib_module_names | {"truespec", "gguf"}, name


@pytest.mark.parametrize("module", ["truespec.server.app", "truespec.tokenizer.backend"])
def test_the_server_process_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
