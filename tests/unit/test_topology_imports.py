"""What topology may import: the standard library, numpy, yaml and itself; torch only in the functions of probe/cuda."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import topology

ROOT = Path(topology.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imports(tree):
    """(module, at top level) of every absolute import."""
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module, id(node) in top


def test_imports():
    assert len(FILES) > 10
    for path in FILES:
        for module, top in imports(ast.parse(path.read_text())):
            name = module.partition(".")[0]
            if name == "torch":
                assert path.relative_to(ROOT).as_posix() == "probe/cuda.py" and not top, path
            else:
                assert name in sys.stdlib_module_names or name in ("numpy", "yaml"), f"{path} imports {module}"


def test_flow_and_the_search_are_pure():
    for name in ("flow.py", "routes.py"):
        modules = {module for module, _ in imports(ast.parse((ROOT / name).read_text()))}
        assert modules.isdisjoint({"os", "sys", "time", "random", "pathlib", "subprocess", "yaml"})


def test_importing_topology_loads_no_torch():
    code = "import sys, topology, topology.probe; sys.exit('torch' in sys.modules or 'memferry_npu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent).returncode == 0


def test_every_file_says_what_it_owns():
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        assert len(path.read_text().splitlines()) < 450, path
