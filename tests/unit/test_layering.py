"""The dependency direction between folders, read from the source without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TOP_LEVEL = ("memferry_npu", "topology", "cuda_ops", "ascendc_ops")

LAYERS = ("backend", "memory", "transfer", "schedule", "optim", "runtime", "top")
"""Left to right: a folder imports from itself and from those before it."""

TOP_MODULES = frozenset({"__init__", "__main__", "api", "cli", "config", "env", "report", "strict_yaml", "train"})
TORCH_FREE = (
    "memferry_npu/runtime/policy.py",
    *(f"memferry_npu/{name}.py" for name in ("__init__", "__main__", "cli", "config", "env", "report", "strict_yaml")),
)


def sources() -> list[Path]:
    return sorted(path for top in TOP_LEVEL for path in (ROOT / top).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, at_import: bool = False) -> Iterator[str]:
    """Absolute names of what a file imports, `from a import b` as a.b; with at_import only what its import runs."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")
            prefix = ".".join(base[: len(base) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (prefix, node.module)))
            yield from (f"{source}.{alias.name}" for alias in node.names)
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        pending.extend(ast.iter_child_nodes(node))


def layer(module: str) -> str | None:
    """The layer of an absolute name of memferry_npu; None for other packages."""
    parts = module.split(".")
    if parts[0] != "memferry_npu":
        return None
    second = parts[1] if len(parts) > 1 else "__init__"
    return second if second in LAYERS else "top"


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_scan_sees_the_tree() -> None:
    files = {relative(path) for path in sources()}
    assert {"memferry_npu/config.py", "memferry_npu/backend/base.py", "topology/flow.py"} <= files
    for path in (ROOT / "memferry_npu").iterdir():
        if path.suffix == ".py" or (path / "__init__.py").is_file():
            assert path.stem in TOP_MODULES or path.name in LAYERS, f"{path.name}: which layer is it in?"


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_imports_go_downwards(path: Path) -> None:
    own = layer(module_name(path))
    for name in imports(path):
        top = name.split(".")[0]
        other = layer(name)
        if own is None and other is not None:
            allowed = top == module_name(path).split(".")[0] or (
                name.startswith("memferry_npu.backend") and not relative(path).startswith("topology/")
            )
            assert allowed, f"{relative(path)} imports {name}"
        if own is None or other is None or own == "top":
            continue
        # The policy is a plain value and torch-free: planning reads it.
        if name.startswith("memferry_npu.runtime.policy"):
            continue
        # The lazy names of the package would pull in the top.
        assert other != "top", f"{relative(path)} imports {name}"
        assert LAYERS.index(other) <= LAYERS.index(own), f"{relative(path)} ({own}) imports {name} ({other})"


def test_topology_needs_only_numpy_and_yaml() -> None:
    import sys

    allowed = {*sys.stdlib_module_names, "numpy", "yaml", "topology"}
    for path in (ROOT / "topology").rglob("*.py"):
        extra = {"torch"} if path.relative_to(ROOT / "topology").parts[0].startswith("probe") else set()
        for name in imports(path):
            assert name.split(".")[0] in allowed | extra, f"{relative(path)} imports {name}"


def test_kernels_import_the_loader_only() -> None:
    for path in (*(ROOT / "cuda_ops").rglob("*.py"), *(ROOT / "ascendc_ops").rglob("*.py")):
        for name in imports(path):
            if name.startswith("memferry_npu"):
                assert name.startswith("memferry_npu.backend"), f"{relative(path)} imports {name}"


def test_the_framework_does_not_import_its_tests_or_scripts() -> None:
    for path in sources():
        for name in imports(path):
            assert name.split(".")[0] not in ("tests", "scripts"), f"{relative(path)} imports {name}"


def device_uses(path: Path) -> Iterator[str]:
    """`torch.cuda...`, `torch.npu...`, `torch_npu...` and `torch.accelerator...` in code, not in text."""
    for name in imports(path):
        if name.startswith(("torch.cuda", "torch.npu", "torch_npu", "torch.accelerator")):
            yield name
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pair = f"{node.value.id}.{node.attr}"
            if pair in ("torch.cuda", "torch.npu", "torch.accelerator") or node.value.id == "torch_npu":
                yield f"line {node.lineno}: {pair}"


def test_no_device_is_touched_above_the_backends() -> None:
    for path in sources():
        name = relative(path)
        if name.startswith(("memferry_npu/backend/", "cuda_ops/", "ascendc_ops/", "topology/probe")):
            continue
        assert list(device_uses(path)) == [], name


def source_of(name: str) -> Path | None:
    """The file of one of our modules; of the module that a name lies in; None for other packages."""
    parts = name.split(".")
    while parts and parts[0] in TOP_LEVEL:
        path = ROOT.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        parts.pop()
    return None


def test_what_reads_run_files_does_not_need_torch() -> None:
    """Nor does anything that is imported on the way, packages included."""
    pending, seen = [ROOT / name for name in TORCH_FREE], set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        pending.extend(p / "__init__.py" for p in path.parents if (p / "__init__.py").is_file())
        for name in imports(path, at_import=True):
            assert name.split(".")[0] not in ("torch", "torch_npu"), f"{relative(path)} imports {name}"
            source = source_of(name)
            if source is not None:
                pending.append(source)
    assert ROOT / "memferry_npu" / "runtime" / "policy.py" in seen
