"""The library's errors. Each is also the error of Python that is nearest to it."""


class Error(Exception):
    """An error of the library."""


class InvalidUsage(Error, ValueError):
    """A call with wrong arguments; nothing has changed."""


class Unsupported(Error, NotImplementedError):
    """The transport can't do this; nothing has changed."""


class Timeout(Error, TimeoutError):
    """An operation was not done in time; the message names the rank that delays it."""


class PeerLost(Error, ConnectionError):
    """A rank has died or left."""


class Aborted(Error, RuntimeError):
    """A rank has aborted the communicator."""


class Mismatch(Error, RuntimeError):
    """The ranks have made different calls."""


class BackendError(Error, RuntimeError):
    """The transport has failed."""


class SystemError(Error, OSError):  # noqa: A001  (the name that it has in C++)
    """The operating system has refused something."""
