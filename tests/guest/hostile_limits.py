"""Attempts to use up what is not its own. All of it comes out of the machine's share: what is too much is refused,
or ends the one who asked. The host and the neighbour are asked afterwards."""

import ctypes
import mmap
import os
import resource
import select
import socket
import threading
import time

from attempts import BOTH, CONFIG, Own, attempt, libc, syscall

MEMORY = CONFIG["memory_mib"] << 20
SECONDS = 5


def until_refused(make, most):
    """Makes things until there is an error, there are enough, or time is up."""
    end = time.monotonic() + SECONDS
    made = []
    try:
        while len(made) < most and time.monotonic() < end:
            made.append(make(len(made)))
        return Own(f"{len(made)} of them")
    except (OSError, MemoryError) as error:
        return Own(f"{len(made)} of them, then {error!r}")


@attempt("fill /dev/shm")
def _():
    block, written = b"x" * (1 << 20), 0
    try:
        with open("/dev/shm/full", "wb", buffering=0) as file:
            while written <= MEMORY:
                written += file.write(block)
        return f"{written} bytes of {MEMORY}"
    finally:
        os.unlink("/dev/shm/full")


@attempt("use up all open files", own=BOTH)
def _():
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    return until_refused(lambda _: os.open("/dev/null", os.O_RDONLY), 1_000_000)


@attempt("map more memory than there is", own=BOTH)
def _():
    return until_refused(lambda n: mmap.mmap(-1, 1 << (40 - min(n, 10)), flags=mmap.MAP_PRIVATE | 0x4000), 2000)


@attempt("lock memory", own=BOTH)
def _():
    area = mmap.mmap(-1, 64 << 20)
    code = libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area))), len(area))
    return Own(f"mlock {code}")


@attempt("use up pipes and their buffers", own=BOTH)
def _():
    def full(_):
        reader, writer = os.pipe2(os.O_NONBLOCK)
        os.write(writer, b"x" * 65536)
        return reader
    return until_refused(full, 500)


@attempt("use up the buffers of sockets", own=BOTH)
def _():
    def full(_):
        pair = socket.socketpair()
        pair[0].setblocking(False)
        pair[0].send(b"x" * 131072)
        return pair
    return until_refused(full, 300)


@attempt("use up terminals", own=BOTH)
def _():
    return until_refused(lambda _: os.openpty(), 5000)


@attempt("use up timers, watches and event queues", own=BOTH)
def _():
    watch = libc.inotify_init1(0)
    def one(n):
        path = f"/tmp/watch-{n % 50}"
        os.makedirs(path, exist_ok=True)
        if libc.inotify_add_watch(watch, path.encode(), 0xfff) < 0:
            raise OSError(ctypes.get_errno(), "inotify")
        return select.epoll(), syscall(283, 1, 0), syscall(290, 0, 0)
    return until_refused(one, 5000)


@attempt("use up threads", own=BOTH)
def _():
    threading.stack_size(65536)
    stop = threading.Event()
    def one(_):
        try:
            threading.Thread(target=stop.wait, daemon=True).start()
        except RuntimeError as error:
            raise OSError(11, str(error)) from error
    got = until_refused(one, 1500)
    stop.set()
    return got


@attempt("use up System V memory and semaphores", own=BOTH)
def _():
    def one(n):
        return syscall(29, 0, 64 << 20, 0o1600), syscall(64, 0, 250, 0o1600)
    return until_refused(one, 200)


@attempt("nest directories beyond the longest path", own=BOTH)
def _():
    os.makedirs("/tmp/deep", exist_ok=True)
    os.chdir("/tmp/deep")
    for _ in range(60):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    open("bottom", "w").close()
    return Own("a path of 12,000 bytes")


@attempt("claim a file of the largest size", own=BOTH)
def _():
    with open("/tmp/vast", "wb") as file:
        got = None
        for size in (1 << 62, 1 << 44, 1 << 40):
            try:
                os.truncate(file.fileno(), size)
                got = Own(f"{size} bytes of nothing")
                break
            except OSError:
                pass
        try:
            os.posix_fallocate(file.fileno(), 0, 1 << 40)
            got = "a terabyte that is not there"
        except OSError:
            pass
    os.unlink("/tmp/vast")
    return got


@attempt("nest mounts, links and epolls without end", own=BOTH)
def _():
    path = "/tmp/loop"
    os.symlink(path, path)
    try:
        os.stat(path)
    except OSError:
        pass
    os.unlink(path)
    inner = select.epoll()
    def nest(_):
        nonlocal inner
        outer = select.epoll()
        outer.register(inner.fileno(), select.EPOLLIN)
        inner = outer
        return outer
    return until_refused(nest, 500)


@attempt("use up all inodes", own=BOTH)
def _():
    os.makedirs("/tmp/many", exist_ok=True)
    try:
        return until_refused(lambda n: os.close(os.open(f"/tmp/many/{n}", os.O_CREAT | os.O_WRONLY)), 50_000)
    finally:
        for entry in os.scandir("/tmp/many"):
            os.unlink(entry.path)
