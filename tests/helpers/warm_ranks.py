"""Warm ranks: ranks of a launch that are forked from a server that has imported torch, so that none imports it itself.

    python warm_ranks.py serve FOLDER NAME                    a server: listens on the Unix socket FOLDER/NAME
    python warm_ranks.py mpiexec FOLDER MPIEXEC ARGUMENTS     MPIEXEC ARGUMENTS, with warm ranks
    python warm_ranks.py rank FOLDER ARGUMENTS                a stand-in for `python ARGUMENTS`

`mpiexec` puts `rank` in place of the Python executable in ARGUMENTS and executes MPIEXEC, which starts a `rank` process
where it would start Python. This process imports neither torch nor MPI. It sends its arguments, environment, working
directory and open files to a server, which forks a child; the child takes them over and runs the program, as the actual
rank: MPI is initialized only there. Meanwhile the `rank` process relays signals to the child, then exits as it did; if
the `rank` process dies, the server kills the child. Started without mpiexec, `rank` is a launch of one rank.

A server imports torch on the first request. There are two servers, for even and for odd ranks, so that string hashes
differ between ranks, as they do between processes. A rank is started cold, as a Python that imports torch itself, where
no server listens, for another MPI than MPICH, with Python's options other than -c and -m, with COLD_RANKS=1, and where
variables that Python or a library reads once, on startup, are not those of the server, which appends their names to
FOLDER/in-the-way.

A warm rank exits as Python does, but without tearing down the modules and libraries that it was forked with, which
would take longer than most ranks run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TextIO

COLD = "COLD_RANKS"
OTHER_MPI = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK"}  # in the ranks of Open MPI
READ_AT_IMPORT = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMBA_", "LD_", "MALLOC_")  # libraries set others themselves
IN_THE_WAY = "in-the-way"  # a file in FOLDER
OBEYED = ("PYTHONPATH", "PYTHONWARNINGS")  # `run` applies them
PRELOADED = (
    "numba", "numpy", "torch", "torch._dynamo", "torch.distributed", "torch._subclasses.fake_tensor",
    "torch.export._trace", "transformers.models.gpt2.modeling_gpt2", "safetensors.torch", "schedgen.checker",
    "schedgen.cli.main", "schedgen.compiler.compile", "schedgen.planner.plan", "schedgen.simulator.footprint",
)  # fmt: skip
WHERE = signal.SIGQUIT  # makes a rank print the stacks of its threads on stderr
RELAYED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, WHERE)


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that take effect when Python starts or a library is loaded, except those that `run` applies."""
    return {key: text for key, text in environment.items() if key.startswith(READ_AT_IMPORT) and key not in OBEYED}


def mpiexec(folder: str, words: list[str]) -> None:
    """Execute `words`, an mpiexec command; `rank` replaces Python if that is this venv's and COLD_RANKS is not set."""
    for place, word in enumerate(words):
        if Path(word).name.startswith("python") and (file := shutil.which(word)):
            if Path(file).parent.samefile(Path(sys.executable).parent) and COLD not in os.environ:
                words[place : place + 1] = [sys.executable, "-I", "-S", __file__, "rank", folder]
            break
    os.execvp(words[0], words)


def rank_here() -> int:
    """The rank by MPICH's variable, 0 without a launcher. OSError if the rank must be cold."""
    if COLD in os.environ or OTHER_MPI & os.environ.keys():
        raise OSError("a rank of another MPI, or one that should be cold")
    return int(os.environ.get("PMI_RANK", 0))


def rank(folder: str, words: list[str]) -> None:
    """Have a server fork the rank, relay signals to it, and exit as it does; execute Python if it must be cold."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            server.connect(f"{folder}/{rank_here() % 2}")
        except OSError:
            os.execv(sys.executable, [sys.executable, *words])
        numbers = [int(file.name) for file in Path("/proc/self/fd").iterdir() if file.exists()]
        files = {number: number for number in numbers if number != server.fileno()}
        Request(words, dict(os.environ), str(Path.cwd()), files).send(server)
        answers = server.makefile("rb")
        pid = int(answers.readline() or 0)
        if not pid:
            os.execv(sys.executable, [sys.executable, *words])
        for number in RELAYED:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        status = int(answers.readline() or signal.SIGKILL)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) in RELAYED:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


class Request(NamedTuple):
    """The process that `rank` has a server fork: its arguments, environment, working directory and open files."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    files: dict[int, int]  # descriptor in the rank: descriptor of the same file in this process

    @classmethod
    def receive(cls, connection: socket.socket) -> Request:
        """Read a request that `send` has written."""
        size, files, _, _ = socket.recv_fds(connection, 4, 64)
        with connection.makefile("rb") as stream:
            words, environment, folder, numbers = json.loads(stream.read(int.from_bytes(size, "little")))
        return cls(words, environment, folder, dict(zip(numbers, files, strict=True)))

    def send(self, connection: socket.socket) -> None:
        """Write the request, and pass the descriptors of its files."""
        data = json.dumps([self.words, self.environment, self.folder, list(self.files)]).encode()
        socket.send_fds(connection, [len(data).to_bytes(4, "little")], list(self.files.values()))
        connection.sendall(data)


class Server:
    """Forks a rank for every `rank` process that connects to the socket `path`, until stdin is closed."""

    def __init__(self, path: str) -> None:
        """Wait for the first connection, then import what ranks need; later connections wait."""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(f"{path}-")
        self.listener.listen(64)
        Path(f"{path}-").rename(path)  # once it exists, connections are accepted
        self.in_the_way = Path(path).with_name(IN_THE_WAY)
        self.variables = read_at_import(os.environ)
        if self.listener not in select.select([0, self.listener], [], [])[0]:
            sys.exit()
        atexit.register(keep_inherited)  # registered first, hence called last
        gc.disable()
        warm_up()
        end_here()
        gc.collect()
        gc.freeze()
        gc.enable()
        self.ended, end = os.pipe()  # readable once a rank has ended
        os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        self.ranks: dict[int, socket.socket] = {}  # pid of a rank: the connection of its `rank` process
        self.selector = selectors.DefaultSelector()
        for file in (0, self.ended, self.listener):
            self.selector.register(file, selectors.EVENT_READ)

    def serve(self) -> Request:
        """Serve connections. Returns only in a forked rank: its request."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == 0:
                    for pid in self.ranks:
                        os.kill(pid, signal.SIGKILL)
                    sys.exit()
                elif key.fileobj == self.ended:
                    self.report()
                elif key.fileobj is self.listener:
                    if request := self.fork(self.listener.accept()[0]):
                        return request
                elif key.data in self.ranks:  # its `rank` process has died
                    self.selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)

    def fork(self, connection: socket.socket) -> Request | None:
        """Fork a rank and answer its pid, or 0 if it must be cold. Return its request in the rank, None here."""
        request = Request.receive(connection)
        other = read_at_import(request.environment).items() ^ self.variables.items()
        if other:
            with self.in_the_way.open("a") as names:
                print(*sorted({name for name, _ in other}), file=names)
        if other or not can_be_forked(request.words):
            answer(connection, 0)
            connection.close()
        elif pid := os.fork():
            self.ranks[pid] = connection
            self.selector.register(connection, selectors.EVENT_READ, pid)
            answer(connection, pid)
        else:
            end = signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.selector.close()
            for file in (self.ended, end, self.listener.detach(), connection.detach()):
                os.close(file)
            for other in self.ranks.values():
                os.close(other.detach())
            return request
        for file in request.files.values():
            os.close(file)
        return None

    def report(self) -> None:
        """Send the wait status of every rank that has ended to its `rank` process."""
        os.read(self.ended, 4096)
        for pid in list(self.ranks):
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                with self.ranks.pop(pid) as connection:
                    answer(connection, status)
                    with contextlib.suppress(KeyError):
                        self.selector.unregister(connection)


def warm_up() -> None:
    """Import what ranks need, and do once what takes seconds the first time: numba's tables, torch's fake tensors."""
    for module in PRELOADED:
        importlib.import_module(module)
    import torch
    from numba.core.registry import cpu_target
    from torch._subclasses.fake_tensor import FakeTensorMode

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    with FakeTensorMode():
        torch.nn.functional.linear(torch.empty(1, 1), torch.empty(1, 1))


def end_here() -> None:
    """Skip, at exit, the exit handlers of C and destructors of libraries that are registered by now."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # is called before the handlers registered earlier, with the exit status
    libc.__cxa_atexit(libc.fflush, None, None)  # is called before that, and flushes all streams


inherited: dict[str, ModuleType] = {}  # in a rank: the modules that it was forked with


def keep_inherited() -> None:
    """Hide the inherited modules from Python's shutdown, which follows, and would tear them down."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
    for name, module in inherited.items():
        if sys.modules.get(name) is module and name not in ("builtins", "sys", "__main__"):
            del sys.modules[name]


def answer(connection: socket.socket, number: int) -> None:
    """Send a number as a line; nothing if the other end is closed."""
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % number)


def can_be_forked(words: list[str]) -> bool:
    """Whether `run` can do what Python would do with these arguments."""
    return bool(words) and (not words[0].startswith("-") or (words[0] in ("-c", "-m") and len(words) > 1))


def begin(request: Request) -> None:
    """Take over the open files, standard streams, environment and working directory of a request."""
    above = 1 + max(*request.files, *request.files.values())
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD, above) for number, file in request.files.items()}
    for file in request.files.values():
        os.close(file)
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = reopened(number, getattr(sys, f"__{name}__"))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.register(WHERE, sys.__stderr__)
    inherited.update(sys.modules)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)


def reopened(number: int, stream: TextIO) -> TextIO:
    """A standard stream for the file that is now open under `number`: line-buffered for stderr and for a terminal."""
    how = "w" if number else "r"
    lines = 1 if number == 2 else -1
    return open(number, how, lines, encoding=stream.encoding, errors=stream.errors, closefd=False)


def run(words: list[str]) -> None:
    """Do what `python WORDS` does once it has started."""
    warnings._processoptions(filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")))  # type: ignore[attr-defined]
    first = {"-c": "", "-m": str(Path.cwd())}.get(words[0], str(Path(words[0]).resolve().parent))
    sys.path[:0] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        del sys.path[0]
        asked = Server(str(Path(*sys.argv[2:4]))).serve()
        begin(asked)
        run(asked.words)
    else:
        {"mpiexec": mpiexec, "rank": rank}[sys.argv[1]](sys.argv[2], sys.argv[3:])
