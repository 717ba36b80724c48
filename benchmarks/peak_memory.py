"""How much memory a block of code takes at most."""

from __future__ import annotations

import threading
import time
from pathlib import Path


class Peak:
    """The largest anonymous memory of this process while the block runs, beyond what it was at its begin; in bytes."""

    def __enter__(self) -> Peak:
        self.begin = self.most = anonymous_bytes()
        self.cpu_seconds = 0.0  # of sampling
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.most = max(self.most, anonymous_bytes())
        self.cpu_seconds = time.thread_time()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.most - self.begin


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status must have RssAnon (Linux 4.5 or later)")
