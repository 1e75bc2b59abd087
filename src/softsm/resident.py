"""The client of `softsm serve`: commands run in a copy of the resident process, which has loaded everything already.

`softsm check`, `run`, `trace` and `time`, and `pytest --softsm` ask for one before they import anything heavy. A
resident process accepts a command only if it would have been started alike: the same interpreter, the same packages,
the same environment variables as far as they decide what an import does. Otherwise the command runs by itself.

A request is one JSON object with a length before it, and the three standard streams as file descriptors. The answer is
{"pid": N} and later {"status": N}, or {"differs": what}.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import socket
import stat
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

COMMANDS = ("check", "run", "trace", "time")
PACKAGES = ("torch", "triton", "numba", "numpy", "ml_dtypes", "pytest")
PREFIXES = ("PYTHON", "TRITON", "TORCH", "OMP_", "MKL_", "KMP_", "NUMBA", "SOFTSM", "LD_", "LLVM")  # read at import
OWN = "SOFTSM_SERVE"
LENGTH = struct.Struct("!I")
PATIENCE = 5.0  # seconds for an answer; forking takes a few milliseconds


def socket_path() -> Path:
    """Returns the path of the socket, one for each user and each environment."""
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"softsm-{os.getuid()}" / environment


def identity() -> dict[str, Any]:
    """Returns what must be equal in both processes."""
    found: dict[str, Any] = {"Python": [sys.version, sys.prefix]}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
        found[name] = [origin, os.stat(origin).st_mtime_ns] if origin else None
    here = Path(__file__).parent
    found["softsm"] = [str(here), max(path.stat().st_mtime_ns for path in here.rglob("*.py"))]
    environment = {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES) and k != OWN}
    return found | environment


def hand_over(kind: str, arguments: list[str]) -> int | None:
    """Returns the exit status of a command that the resident process ran; None if this process has to run it.

    kind: "softsm" or "pytest"."""
    if os.environ.get("SOFTSM_SERVE") == "0" or not hasattr(socket, "send_fds"):
        return None
    path = socket_path()
    if not trusted(path):
        return None
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.settimeout(PATIENCE)
            connection.connect(str(path))
            request = {
                "kind": kind,
                "arguments": arguments,
                "path": sys.path,
                "folder": os.getcwd(),
                "environment": dict(os.environ),
                "identity": identity(),
            }
            sys.stdout.flush()
            sys.stderr.flush()
            send(connection, request, [0, 1, 2])
            answer, _ = receive(connection)
        except OSError:
            return None  # the process has just ended, or it hangs
        if answer is None or "pid" not in answer:
            what = answer["differs"] if answer else "it gave no answer"
            print(f"softsm serve is not used: {what}", file=sys.stderr)
            return None
        connection.settimeout(None)
        return followed(connection, answer["pid"])


def followed(connection: socket.socket, pid: int) -> int:
    """Waits for the copy; signals go to it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    answer, _ = receive(connection)
    return answer["status"] if answer else 1


def alive(path: Path) -> bool:
    """Does a process listen there?"""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


def trusted(path: Path) -> bool:
    """Returns whether the socket is this user's, in a folder that only this user can write to."""
    try:
        folder, file = path.parent.lstat(), path.lstat()
    except OSError:
        return False
    own = folder.st_uid == file.st_uid == os.getuid()
    return own and not folder.st_mode & 0o077 and stat.S_ISDIR(folder.st_mode) and stat.S_ISSOCK(file.st_mode)


def send(connection: socket.socket, message: dict[str, Any], files: list[int] | None = None) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(connection, [LENGTH.pack(len(data))], files or [])
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """(message, files); None at the end."""
    head, files, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
    if len(head) < LENGTH.size:
        return None, files
    (left,) = LENGTH.unpack(head)
    data = b""
    while len(data) < left:
        more = connection.recv(left - len(data))
        if not more:
            return None, files
        data += more
    return json.loads(data), files
