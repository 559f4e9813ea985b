"""Tessera for Python: communication over shared memory, TCP, UCX or MPI."""

__version__ = "0.1.0"
