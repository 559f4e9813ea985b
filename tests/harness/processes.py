"""Helpers for processes that the tests start."""

import ctypes
import os
import random
import signal
import socket
import time

PR_SET_PDEATHSIG = 1


def die_with_parent(sent=signal.SIGKILL):
    """For preexec_fn: a killed test leaves no process behind. A launcher gets SIGTERM, to end its ranks itself."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, sent)


def end_with_parent():
    die_with_parent(signal.SIGTERM)


def free_port():
    """One on which nothing listens, below those that the kernel gives to connections: no other test's connection takes it meanwhile."""
    while True:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = random.randrange(10000, 32000)
            try:
                one.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


def with_setting(name, value):
    """The other processes that have this setting in their environment."""
    wanted = f"{name}={value}".encode()
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                if wanted in file.read().split(b"\0") and int(process) != os.getpid():
                    found.append(int(process))
        except OSError:
            pass
    return found


def wait_until_gone(name, value, seconds):
    """Waits until no process has this setting, and kills those that remain after `seconds`. True: none remained."""
    deadline = time.monotonic() + seconds
    while left := with_setting(name, value):
        if time.monotonic() > deadline:
            for process in left:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            return False
        time.sleep(0.05)
    return True
