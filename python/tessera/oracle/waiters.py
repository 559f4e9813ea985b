"""Threads that wait for operations. Callbacks in a backend's own threads would run Python code while Python ends."""

from __future__ import annotations

import queue
import threading
import time
from typing import Callable, Optional

Task = Callable[[], None]


class Waiters:
    """Runs each task at once, in a thread that is idle or new: a task that waits must not delay another one, because the
    two may be operations that need each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Optional[Task]]] = []
        self._threads: dict[int, threading.Thread] = {}

    def run(self, task: Task) -> None:
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            # A daemon: an operation that never completes must not keep the process from its end.
            thread = threading.Thread(target=self._serve, args=(inbox,), daemon=True, name="tessera.oracle")
            with self._lock:
                self._threads[id(inbox)] = thread
            thread.start()
        inbox.put(task)

    def _serve(self, inbox: queue.SimpleQueue[Optional[Task]]) -> None:
        while True:
            task = inbox.get()
            if task is None:
                return
            task()
            del task  # it holds tensors
            with self._lock:
                self._idle.append(inbox)

    def close(self, seconds: float) -> None:
        """Ends the threads. After `seconds` those that wait for an operation are left to themselves."""
        deadline = time.monotonic() + seconds
        while self._threads:
            with self._lock:
                idle, self._idle = self._idle, []
            for inbox in idle:
                inbox.put(None)
                self._threads.pop(id(inbox)).join()
            if time.monotonic() > deadline:
                return
            time.sleep(0 if idle else 0.001)
