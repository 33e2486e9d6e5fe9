"""Memory of the simulated node: host buffers at two addresses, device buffers, the account.

Owns: buffer objects and the byte account with its cap. Must not import torch.cuda,
streams or the dispatch mode.

A host buffer is one memfd mapped twice: once for the CPU and the copy engines, once
for kernels. The two addresses differ, as they do on Ascend, so code that mixes them
up fails here and not first on hardware. Device buffers start out as NaN.
"""

from __future__ import annotations

import mmap
import os
import threading

import torch

from ..base import BackendError, OutOfMemoryError
from .checker import Region

PAGE_BYTES = mmap.PAGESIZE
POISON = 0xFF
"""Byte that fills unloaded slots: 0xFFFF and 0xFFFFFFFF are NaN in bf16 and fp32."""


class Account:
    """Bytes in use on one tier against its cap. Thread-safe."""

    def __init__(self, tier: str, cap_bytes: int, hint: str) -> None:
        self.tier, self.hint = tier, hint
        self.size_bytes = self.cap_bytes = cap_bytes
        self.used_bytes = 0
        self.static_bytes = 0
        self.peak_bytes = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int, unit: str, *, static: bool = False) -> None:
        """Charge `nbytes`. Raises OutOfMemoryError and charges nothing when it does not fit."""
        with self._lock:
            if self.used_bytes + nbytes > self.cap_bytes:
                raise OutOfMemoryError(
                    tier=self.tier,
                    unit=unit,
                    asked_bytes=nbytes,
                    free_bytes=self.cap_bytes - self.used_bytes,
                    cap_bytes=self.cap_bytes,
                    hint=self.hint,
                )
            self.used_bytes += nbytes
            if static:
                self.static_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give(self, nbytes: int, *, static: bool = False) -> None:
        with self._lock:
            self.used_bytes -= nbytes
            if static:
                self.static_bytes -= nbytes


class SimHostBuffer:
    """Pinned, mapped host memory: see `base.HostBuffer`."""

    def __init__(self, nbytes: int, label: str, account: Account) -> None:
        self.nbytes, self.label = nbytes, label
        self._account = account
        self._charged = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
        account.take(self._charged, label)
        try:
            fd = os.memfd_create(f"memferry-{label}"[:200])
            try:
                os.ftruncate(fd, self._charged)
                self._cpu = _tensor_over(mmap.mmap(fd, self._charged))[:nbytes]
                self._mapped = _tensor_over(mmap.mmap(fd, self._charged))[:nbytes]
            finally:
                os.close(fd)
        except OSError as error:
            account.give(self._charged)
            raise BackendError(f"host buffer '{label}' of {nbytes} bytes: {error}") from error
        self.region = Region(label, max(nbytes, 1), strict=True)
        self.cpu_base, self.mapped_base = self._cpu.data_ptr(), self._mapped.data_ptr()
        self._open = True

    def cpu(self) -> torch.Tensor:
        self._check_open()
        return self._cpu

    def mapped(self) -> torch.Tensor:
        self._check_open()
        return self._mapped

    def _check_open(self) -> None:
        if not self._open:
            raise BackendError(f"host buffer '{self.label}' is closed")

    def close(self) -> None:
        """Give the bytes back. Views that outlive the buffer keep the pages alive."""
        if self._open:
            self._open = False
            self._account.give(self._charged)
            del self._cpu, self._mapped


class SimDeviceBuffer:
    """Memory of a simulated device: see `base.DeviceBuffer`."""

    def __init__(self, nbytes: int, label: str, account: Account) -> None:
        self.nbytes, self.label = nbytes, label
        self._account = account
        account.take(nbytes, label, static=True)
        size = max(nbytes, 1)
        self._tensor = _tensor_over(mmap.mmap(-1, size))[:nbytes]
        self._tensor.fill_(POISON)
        self.region = Region(label, size, strict=True)
        self.base = self._tensor.data_ptr()
        self._open = True

    def tensor(self) -> torch.Tensor:
        if not self._open:
            raise BackendError(f"device buffer '{self.label}' is closed")
        return self._tensor

    def close(self) -> None:
        if self._open:
            self._open = False
            self._account.give(self.nbytes, static=True)
            del self._tensor


def _tensor_over(memory: mmap.mmap) -> torch.Tensor:
    """uint8 tensor over an mmap; the tensor keeps the mapping alive."""
    return torch.frombuffer(memory, dtype=torch.uint8)
