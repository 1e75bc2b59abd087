"""`softsm serve` is a process that has loaded torch, Triton and the emulator and runs commands in copies of itself.

Importing torch and Triton and loading native code needs 2 to 3 seconds of CPU time, more than checking most kernels. A
copy (fork) of a process that has done so starts at once. The resident process itself runs no command and no user
kernel, and starts no thread, so that a copy is as good as a new process.
"""

from __future__ import annotations

import os
import random
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from softsm import resident

KERNEL = """
.version 8.6 .target sm_90 .address_size 64
.visible .entry nothing(.param .u64 x)
{
    .reg .b64 %rd<2>; .reg .b32 %r<2>;
    ld.param.u64 %rd1, [x];
    ld.global.u32 %r1, [%rd1];
    st.global.u32 [%rd1], %r1;
    ret;
}
"""


def preload() -> None:
    """Loads everything that a command would import, and the native code that every launch needs."""
    import importlib

    import numpy as np

    import softsm

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the commands use no GPU
    optional = ("torch", "triton", "triton.experimental.gluon.language.nvidia.blackwell", "_pytest.config")
    ours = ("softsm.commands.check", "softsm.doors.triton.install", "softsm.doors.driver.loading")
    for name in (*optional, *ours):
        try:
            importlib.import_module(name)
        except ImportError:
            if name in ours:
                raise
    with softsm.checking():
        softsm.load_ptx(KERNEL)[1, 1](np.zeros(1, np.uint32))


class Server:
    """Manages the copies, each with the connection of its client."""

    def __init__(self, path: Path, command: Callable[[str, list[str]], int]):
        """Opens the socket. command: runs a client's request, given its kind and its arguments."""
        self.command = command
        self.identity = resident.identity()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        mask = os.umask(0o077)
        try:
            path.unlink(missing_ok=True)
            self.listener.bind(str(path))
        finally:
            os.umask(mask)
        if not resident.trusted(path):
            raise ValueError(f"folder: got {path.parent}; accepted: a folder of this user that no other user may read")
        self.listener.listen()
        self.running: dict[int, socket.socket] = {}
        self.wakes, self.wake = socket.socketpair()
        for end in (self.wakes, self.wake):
            end.setblocking(False)

    def run(self, idle: float) -> None:
        """Serves until no request has arrived for `idle` seconds, or until an interrupt."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake.fileno())
        selector = selectors.DefaultSelector()
        for source in (self.listener, self.wakes):
            selector.register(source, selectors.EVENT_READ)
        asked = time.monotonic()
        try:
            while self.running or time.monotonic() - asked < idle:
                for key, _ in selector.select(idle):
                    if key.fileobj is self.listener:
                        asked = time.monotonic()
                        if (connection := self.accept()) is not None:
                            selector.register(connection, selectors.EVENT_READ)
                    elif key.fileobj is self.wakes:
                        self.wakes.recv(4096)
                        for connection in self.ended():
                            if connection.fileno() in selector.get_map():
                                selector.unregister(connection)
                            connection.close()
                    else:
                        selector.unregister(key.fileobj)
                        self.hung_up(key.fd)  # the copy ends, which the code above notices
        finally:
            signal.set_wakeup_fd(-1)
            self.path.unlink(missing_ok=True)
            for pid in self.running:
                os.kill(pid, signal.SIGTERM)

    def accept(self) -> socket.socket | None:
        connection, _ = self.listener.accept()
        files: list[int] = []
        try:
            connection.settimeout(resident.PATIENCE)
            request, files = resident.receive(connection)
            if request is None:
                connection.close()
                return None
            differs = difference(self.identity, request["identity"])
            if differs:
                resident.send(connection, {"differs": differs})
                connection.close()
                return None
            pid = os.fork()
            if pid == 0:
                self.become(request, files, connection)
            self.running[pid] = connection
            resident.send(connection, {"pid": pid})
            return connection
        except OSError:
            connection.close()
            return None
        finally:
            for file in files:
                os.close(file)

    def become(self, request: dict[str, Any], files: list[int], connection: socket.socket) -> None:
        """Runs the command in the copy and ends the copy."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for other in (self.listener, self.wakes, self.wake, connection, *self.running.values()):
                other.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            streams()
            os.environ.clear()
            os.environ.update(request["environment"] | {resident.OWN: "0", "CUDA_VISIBLE_DEVICES": ""})
            os.chdir(request["folder"])
            sys.path[:] = request["path"]
            random.seed()
            status = self.command(request["kind"], request["arguments"])
        except SystemExit as done:
            status = done.code if isinstance(done.code, int) else int(done.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def ended(self) -> list[socket.socket]:
        """Returns the connections of copies that have ended, after sending each the status."""
        found = []
        while self.running:
            try:
                pid, how = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            connection = self.running.pop(pid)
            code = os.waitstatus_to_exitcode(how)
            try:
                resident.send(connection, {"status": code if code >= 0 else 128 - code})
            except OSError:
                pass  # the client has disconnected
            found.append(connection)
        return found

    def hung_up(self, number: int) -> None:
        """Ends the copy whose client, at this descriptor, has disconnected."""
        for pid in [pid for pid, connection in self.running.items() if connection.fileno() == number]:
            os.kill(pid, signal.SIGKILL)


def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Returns the first difference, in words."""
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            return f"{name} differs from what the resident process has; restart softsm serve"
    return ""


def streams() -> None:
    """Reopens Python's standard streams on the descriptors that have just been replaced."""
    sys.stdin = open(0, closefd=False)
    for name, number in (("stdout", 1), ("stderr", 2)):
        lines = number == 2 or os.isatty(number)
        stream = open(number, "w", buffering=1 if lines else -1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
