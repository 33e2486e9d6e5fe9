"""The host worker: one thread that runs optimizer jobs in order, off the training thread.

Owns: the thread and how its errors surface. Must not import runtime.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class HostWorker:
    """Runs submitted callables one after another. State over time: its thread and first error.

    After an error the worker runs nothing more: later jobs get `on_error` instead, so that
    nobody waits for a flag that no one will set.
    """

    def __init__(self, name: str = "memferry-host") -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Callable[[BaseException], None]] | None] = (
            queue.SimpleQueue()
        )
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], on_error: Callable[[BaseException], None]) -> None:
        """Queue `job`. Should it (or an earlier one) fail, `on_error` is called in the worker."""
        self._jobs.put((job, on_error))

    def check(self) -> None:
        """Raise the worker's first error, if there was one."""
        if self.error is not None:
            raise RuntimeError(
                f"the host optimizer failed: {self.error}; weights may be half updated, load a checkpoint"
            ) from self.error

    def close(self) -> None:
        """Finish the queue and end the thread."""
        if self._thread.is_alive():
            self._jobs.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, on_error = item
            if self.error is None:
                try:
                    job()
                    continue
                except BaseException as error:  # surfaces at the next call, see check()
                    self.error = error
            on_error(self.error)
