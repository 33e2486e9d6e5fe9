"""What the CUDA meter needs from the operating system: the runtime's copy call, threads near memory, a stopwatch.

Must not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable, Iterator

from ..codec import TopologyError
from ..model import HostMemory
from ..texts import parse_cpu_list


def timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return max(time.perf_counter() - start, math.ulp(1.0))


def runtime_memcpy() -> Callable[[int, int, int, int], None] | None:
    """`cudaMemcpyAsync` (kind by address) of the runtime that torch has loaded, or None if it cannot be found."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            names = {line.split(maxsplit=5)[-1].strip() for line in maps if "libcudart" in line}
        runtime = ctypes.CDLL(sorted(names)[0])
        call = runtime.cudaMemcpyAsync
    except (OSError, IndexError, AttributeError):
        return None
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    call.restype = ctypes.c_int

    def memcpy(dst: int, src: int, nbytes: int, stream: int) -> None:
        status = call(dst, src, nbytes, 4, stream)
        if status != 0:
            raise TopologyError(f"cudaMemcpyAsync of {nbytes} bytes failed with CUDA error {status}")

    return memcpy


@contextlib.contextmanager
def bound(host: HostMemory) -> Iterator[None]:
    """Every thread of this process on the processors of a host memory, so that first touch and readers are near it."""
    before: dict[int, set[int]] = {}
    wanted = set(parse_cpu_list(host.cpus)) if host.cpus else set()
    try:
        for name in os.listdir("/proc/self/task") if wanted else ():
            with contextlib.suppress(OSError):
                now = os.sched_getaffinity(int(name))
                if now & wanted and now - wanted:
                    os.sched_setaffinity(int(name), now & wanted)
                    before[int(name)] = now
        yield
    finally:
        for task, cpus in before.items():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(task, cpus)
