"""`memferry env`: what a bug report needs to say about a machine.

Owns: the probes and their text and JSON form. Must import only the standard
library: the report prints on machines where torch or anything else is broken.
Whatever could fail to import runs in a child process with a time limit, so that
even a crash of `import torch` is one line of the report.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memferry_npu import __version__

_CHILD_SECONDS = 120  # `import torch` from a cold network disk can take a minute
_TOOL_SECONDS = 20  # nvidia-smi without persistence mode takes several seconds
_VARIABLES = (
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_OPP_PATH",
    "ASCEND_RT_VISIBLE_DEVICES",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "LD_LIBRARY_PATH",
    "MEMFERRY_CACHE",
    "OMP_NUM_THREADS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "WORLD_SIZE",
    "XDG_CACHE_HOME",
)


def report() -> dict[str, Any]:
    """All sections of the report. Never raises: a probe that fails is {"error": reason}."""
    sections: dict[str, Any] = {}
    for name, probe in _PROBES.items():
        sections[name] = _guarded(probe)
    sections["notes"] = _guarded(lambda: list(_notes(sections)))
    return sections


def main(*, as_json: bool) -> int:
    """Print the report. Always 0: a broken environment is what the report is for."""
    sections = report()
    print(json.dumps(sections, indent=2) if as_json else format_report(sections))
    return 0


def format_report(sections: dict[str, Any]) -> str:
    """The report as `#` headings and aligned `key  value` lines."""
    lines = [f"# memferry env {__version__}"]
    for name, section in sections.items():
        lines += ["", f"# {name}"]
        rows = dict(_flatten("", section))
        width = max((len(key) for key in rows), default=0)
        lines += [f"{key:<{width}}  {value}".strip() for key, value in rows.items()] or ["none"]
    return "\n".join(lines)


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else key, item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _flatten(f"{prefix}[{index}]" if prefix else str(index + 1), item)
    else:
        yield prefix, "not found" if value is None else " ".join(str(value).split("\n"))


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # the report prints whatever is missing
        return {"error": f"{type(error).__name__}: {error}"}


def _run(*command: str, seconds: float = _TOOL_SECONDS) -> str | None:
    """Standard output of a tool; None where there is no such tool; a line saying why where it fails."""
    path = shutil.which(command[0])
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *command[1:]], capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {seconds:g} s"
    text = done.stdout.decode(errors="replace").strip()
    if done.returncode:
        tail = (done.stderr.decode(errors="replace").strip() or text).splitlines()
        return f"exit status {done.returncode}: {tail[-1] if tail else 'no output'}"
    return text


def _child(code: str, **variables: str) -> dict[str, Any]:
    """Run Python code that fills a dict `out`, in a child with this interpreter; {"error": ...} if it dies."""
    program = f"import json, sys\nout = {{}}\n{code}\nsys.stdout.write('\\n' + json.dumps(out))"
    env = {**os.environ, **variables}
    # A child finds this package the way its parent did: checkout or installed.
    env["PYTHONPATH"] = os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), str(_root())])
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            timeout=_CHILD_SECONDS,
            env=env,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {_CHILD_SECONDS} s"}
    if done.returncode:
        tail = done.stderr.decode(errors="replace").strip().splitlines()
        end = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        return {"error": tail[-1] if tail else end}
    return dict(json.loads(done.stdout.decode(errors="replace").splitlines()[-1]))


def _root() -> Path:
    return Path(__file__).resolve().parent.parent


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, Any]:
    # Only a checkout of this project counts, not whatever repository an environment happens to lie in.
    checkout = (_root() / ".git").exists()
    git = _run("git", "-C", str(_root()), "rev-parse", "--short", "HEAD") if checkout else None
    names = ("torch", "numpy", "PyYAML", "torch_npu")
    return {
        "memferry": __version__,
        "git": git,
        "python": f"{platform.python_version()} ({platform.python_implementation()}) {sys.executable}",
        **{name: _installed(name) for name in names},
    }


def _torch() -> dict[str, Any]:
    code = """
import torch
out["version"] = torch.__version__
out["cuda"] = torch.version.cuda
out["threads"] = torch.get_num_threads()
out["cpu capability"] = torch.backends.cpu.get_cpu_capability()
out["cuda available"] = torch.cuda.is_available()
out["npu available"] = bool(hasattr(torch, "npu") and torch.npu.is_available())
"""
    result = _child(code)
    if "error" in result and "error" not in _child(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0"):
        result["with TORCH_DEVICE_BACKEND_AUTOLOAD=0"] = "imports"
    return result


def _system() -> dict[str, Any]:
    release = dict(line.split("=", 1) for line in (_read("/etc/os-release") or "").splitlines() if "=" in line)
    return {
        "os": release.get("PRETTY_NAME", "").strip('"') or None,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "machine": platform.machine(),
    }


def _cpu() -> dict[str, Any]:
    info: dict[str, str] = {}
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        info.setdefault(key.strip().lower(), value.strip())
    flags = set((info.get("flags") or info.get("features") or "").split())
    # The ones that decide which host kernels run and how fast bf16 is.
    known = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve", "i8mm")
    return {
        "model": info.get("model name") or info.get("cpu part"),
        "cores": os.cpu_count(),
        "usable cores": len(os.sched_getaffinity(0)),
        "quota": _read("/sys/fs/cgroup/cpu.max"),
        "flags": " ".join(flag for flag in known if flag in flags) or None,
    }


def _numa() -> dict[str, Any]:
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    found: dict[str, Any] = {}
    for node in nodes:
        total = next(
            (line.split()[-2] for line in (_read(f"{node}/meminfo") or "").splitlines() if "MemTotal" in line), None
        )
        size = f"{int(total) / 2**20:.1f} GiB" if total else "size not found"
        found[node.name] = f"cpus {_read(f'{node}/cpulist')}, {size}"
    return found


def _memory() -> dict[str, Any]:
    import resource

    info = dict(line.split(":", 1) for line in (_read("/proc/meminfo") or "").splitlines() if ":" in line)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        **{key: _kib(info.get(key)) for key in ("MemTotal", "MemAvailable", "SwapTotal")},
        "cgroup limit": _read("/sys/fs/cgroup/memory.max"),
        "memlock limit": f"soft {_limit(soft)}, hard {_limit(hard)}",
        "transparent huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge pages": f"{info.get('HugePages_Total', '?').strip()} of {info.get('Hugepagesize', '?').strip()}",
        "/dev/shm": _guarded(lambda: f"{shutil.disk_usage('/dev/shm').total / 2**30:.1f} GiB"),
    }


def _kib(text: str | None) -> str | None:
    return f"{int(text.split()[0]) / 2**20:.1f} GiB" if text else None


def _limit(value: int) -> str:
    return "unlimited" if value == -1 else f"{value / 2**20:.1f} MiB"


def _tools() -> dict[str, Any]:
    compiler = os.environ.get("CXX") or "c++"
    found = {name: _first_line(_run(name, "--version")) for name in dict.fromkeys((compiler, "g++", "make"))}
    nvcc = (_run("nvcc", "--version") or "").splitlines()
    return {**found, "nvcc": next((line for line in nvcc if "release" in line), None)}


def _first_line(text: str | None) -> str | None:
    return text.splitlines()[0] if text else text


def _accelerators() -> dict[str, Any]:
    query = "--query-gpu=index,name,pci.bus_id,driver_version,memory.total"
    npu = _run("npu-smi", "info", "-l")
    nvidia = _run("nvidia-smi", query, "--format=csv,noheader")
    return {
        "nvidia-smi": nvidia.splitlines() if nvidia and "\n" in nvidia else nvidia,
        "npu-smi": [" ".join(line.split()) for line in npu.splitlines() if line.strip()] if npu else npu,
        "device files": " ".join(sorted(str(p) for p in Path("/dev").glob("davinci[0-9]*"))) or None,
    }


def _cann() -> dict[str, Any]:
    homes = [os.environ.get(name) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    homes.append("/usr/local/Ascend/ascend-toolkit/latest")
    home = next((path for path in homes if path and Path(path).is_dir()), None)
    version = None
    if home is not None:
        files = [Path(home) / "version.cfg", *sorted(Path(home).glob("*/ascend_toolkit_install.info"))]
        version = next((_first_line(_read(str(f))) for f in files if f.is_file()), None)
    return {"home": home, "version": version}


def _host_ops() -> dict[str, Any]:
    return _child(
        """
from memferry_npu.backend.hostops import load_host_ops
ops = load_host_ops()
out.update(kind=ops.name, threads=ops.threads, cause=ops.cause, **ops.info)
"""
    )


def _sim() -> dict[str, Any]:
    return _child(
        """
from memferry_npu.backend.sim import SimBackend
backend = SimBackend()
out["starts"] = True
out["default node"] = backend.node.name
backend.close()
"""
    )


def _environment() -> dict[str, Any]:
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _notes(sections: dict[str, Any]) -> Iterator[str]:
    """What the report already shows to be wrong, and the remedy."""
    versions, torch = sections["versions"], sections["torch"]
    if versions.get("torch_npu") and not sections["CANN"].get("home"):
        yield (
            "torch_npu is installed but no CANN toolkit was found: `import torch` fails in this environment unless "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set; set it, source CANN's set_env.sh, or uninstall torch_npu"
        )
    elif "with TORCH_DEVICE_BACKEND_AUTOLOAD=0" in torch:
        yield "a torch device backend breaks `import torch`: set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    if versions.get("torch") is None:
        yield "torch is not installed: pip install 'memferry-npu'"


_PROBES: dict[str, Callable[[], Any]] = {
    "versions": _versions,
    "torch": _torch,
    "system": _system,
    "cpu": _cpu,
    "numa": _numa,
    "memory": _memory,
    "tools": _tools,
    "accelerators": _accelerators,
    "CANN": _cann,
    "host ops": _host_ops,
    "sim backend": _sim,
    "environment": _environment,
}
