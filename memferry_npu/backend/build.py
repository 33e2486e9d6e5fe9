"""Compiles the host ops with the system's C++ compiler, once, into a cache.

Owns: which compiler and flags, where the library lies, and that any number of
processes may ask for it at once. Must not import torch, numpy or anything of
memferry_npu. Importing this module does nothing; `build_host_ops` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "csrc"
SOURCES = ("host_ops.cpp", "host_layout.cpp")

# -ffp-contract=off: the only fused multiply-adds are those the sources spell out.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno")
COMPILERS = ("c++", "g++", "clang++")
_COMPILE_SECONDS = 300


class BuildError(RuntimeError):
    """The host ops could not be built. The message is the first cause, on one line.

    `log` has all that the compiler said.
    """

    def __init__(self, cause: str, log: str = "") -> None:
        super().__init__(cause)
        self.log = log


@dataclass(frozen=True)
class Built:
    """A library that is ready to load."""

    path: Path
    compiler: str
    """First line of the compiler's version."""
    flags: tuple[str, ...]
    fresh: bool
    """True if this call compiled it, False if it was in the cache."""
    private: Path | None = None
    """A directory for this process alone, to be removed once the library is loaded; else None."""


def build_host_ops() -> Built:
    """Returns the host ops library, compiling it if the cache has none that fits.

    The cache is $MEMFERRY_CACHE, else $XDG_CACHE_HOME/memferry, else
    ~/.cache/memferry; if that cannot be written, a private temporary directory.
    Raises BuildError.
    """
    compiler = find_compiler()
    version = _run([*compiler, "--version"], "cannot be run").splitlines()
    compiler_name = version[0] if version else compiler[0]
    flags = (*FLAGS, *_machine_flags(compiler))
    name = f"libmemferry_host-{_key(compiler, version, flags)}.so"
    target = cache_dir() / name
    if target.exists():  # whole, since it appears by rename; the cache may be read-only
        return Built(target, compiler_name, flags, False)
    try:
        with _locked(target):
            # Again, now that the lock is held: the process that held it before may have built it.
            fresh = not target.exists()
            if fresh:
                _compile(compiler, flags, target)
            return Built(target, compiler_name, flags, fresh)
    except OSError:
        # The cache is no place to write, or its file system has no locks.
        private = Path(tempfile.mkdtemp(prefix="memferry-"))
        try:
            _compile(compiler, flags, private / name)
        except BaseException:
            shutil.rmtree(private, ignore_errors=True)
            raise
        return Built(private / name, compiler_name, flags, True, private)


def find_compiler() -> list[str]:
    """The compiler's command: $CXX (with its arguments) if set, else the first of COMPILERS on PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise BuildError(f"no C++ compiler found: $CXX is {chosen[0]!r}, which is not a program on PATH")
        return chosen
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return [found]
    raise BuildError(
        f"no C++ compiler found (looked for $CXX, {', '.join(COMPILERS)}): install g++ or clang, or set CXX"
    )


def cache_dir() -> Path:
    """Where built libraries are kept; need not exist."""
    own = os.environ.get("MEMFERRY_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path(os.path.expanduser("~")) / ".cache") / "memferry"


def _machine_flags(compiler: list[str]) -> tuple[str, ...]:
    """The flag for this very CPU, if the compiler takes it: the cache key names the CPU."""
    flag = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    probe = [*compiler, flag, "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return (flag,) if done.returncode == 0 else ()


def _key(compiler: list[str], version: list[str], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for part in (*compiler, *version, *flags, platform.machine(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCE_DIR.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def _cpu_features() -> str:
    """Model and instruction sets of the first CPU, as the kernel names them."""
    wanted = ("flags", "features", "model name", "cpu part", "cpu implementer")
    lines: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            field = line.partition(":")[0].strip().lower()
            if field in wanted:
                lines.setdefault(field, line)
    return "\n".join(lines.values())


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Holds an exclusive lock beside `target`, over processes and threads; makes its directory."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(f"{target}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _compile(compiler: list[str], flags: tuple[str, ...], target: Path) -> None:
    """Compiles to a temporary name beside `target`, then renames: `target` is whole or absent."""
    handle, partial = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        sources = [str(SOURCE_DIR / source) for source in SOURCES]
        _run([*compiler, *flags, *sources, "-o", partial], "failed")
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _run(command: list[str], failed: str) -> str:
    """Standard output of `command`; BuildError with the first line that tells why not."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the C++ compiler {command[0]} took more than {_COMPILE_SECONDS} s") from error
    except OSError as error:
        raise BuildError(f"the C++ compiler {command[0]} cannot be run: {error.strerror or error}") from error
    if done.returncode == 0:
        return done.stdout
    log = done.stderr + done.stdout
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it said nothing")
    raise BuildError(f"the C++ compiler {command[0]} {failed} (exit {done.returncode}): {first}", log)
