"""Holds one of everything that has to survive a sleep.

`everything.py` sets all up and answers over a Unix socket; `everything.py check` asks it and prints
one JSON object: for every item "ok", or what is wrong with it.

An item is a class. `__init__` sets it up; `check` fails if it is not as it was left, uses it once, and
leaves something for the next time.
"""

import ctypes
import fcntl
import hashlib
import http.client
import json
import mmap
import os
import pty
import select
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import termios
import threading
import time

SOCKET = "/run/everything"
HERE = os.path.dirname(os.path.abspath(__file__))
PATIENCE = 10


def same(is_, was):
    if is_ != was:
        raise AssertionError(f"{str(is_)[:300]!r} is not {str(was)[:300]!r}")


def wait_for(what, look):
    until = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > until:
            raise AssertionError(f"waited in vain for {what}")
        time.sleep(0.01)
    return found


def connect(port):
    def look():
        try:
            return socket.create_connection(("127.0.0.1", port), PATIENCE)
        except ConnectionRefusedError:
            return None

    return wait_for(f"port {port}", look)


class Identity:
    def __init__(self):
        os.environ["MARK"] = "everything"
        self.was = self.now()
        self.descriptors = None

    def now(self):
        return os.getpid(), os.getppid(), os.getcwd(), os.environ["MARK"], sys.argv, os.uname().release

    def check(self):
        same(self.now(), self.was)
        same(subprocess.check_output(["sh", "-c", "echo $PPID $MARK"], text=True), f"{os.getpid()} everything\n")
        # The first check is made when all items are there.
        count = len(os.listdir("/proc/self/fd"))
        self.descriptors = self.descriptors or count
        same(count, self.descriptors)


class Heap:
    def __init__(self):
        self.bytes = bytearray(os.urandom(50 << 20))
        self.objects = {n: [n, str(n)] for n in range(100_000)}
        self.was = self.now()

    def now(self):
        return hashlib.sha256(self.bytes).hexdigest(), hash(tuple(map(str, self.objects.values())))

    def check(self):
        same(self.now(), self.was)
        self.bytes[os.getpid() :: 1 << 20] = os.urandom(len(range(os.getpid(), 50 << 20, 1 << 20)))
        self.was = self.now()


class Threads:
    def __init__(self):
        self.counts = [0] * 8
        self.held = threading.Lock()
        self.held.acquire()
        self.passed = threading.Event()
        self.threads = [threading.Thread(target=self.count, args=(n,), daemon=True) for n in range(8)]
        self.threads.append(threading.Thread(target=self.wait, daemon=True))
        for thread in self.threads:
            thread.start()
        self.ids = [thread.native_id for thread in self.threads]

    def count(self, n):
        while True:
            self.counts[n] += 1
            time.sleep(0.02)

    def wait(self):
        while True:
            self.held.acquire()
            self.passed.set()

    def check(self):
        before = list(self.counts)
        wait_for("all threads", lambda: all(a > b for a, b in zip(self.counts, before)))
        listed = {int(tid) for tid in os.listdir("/proc/self/task")}
        same(set(self.ids) - listed, set())
        same(self.passed.is_set(), False)
        self.held.release()
        same(self.passed.wait(PATIENCE), True)
        self.passed.clear()


class Node:
    PORT = 7100

    def __init__(self):
        self.process = subprocess.Popen(["node", f"{HERE}/server.js", str(self.PORT)])
        connect(self.PORT).close()
        self.kept = http.client.HTTPConnection("127.0.0.1", self.PORT, timeout=PATIENCE)
        self.state = self.ask(self.kept)
        same(self.state["pid"], self.process.pid)

    def ask(self, connection):
        connection.request("GET", "/state")
        return json.loads(connection.getresponse().read())

    def check(self):
        fresh = http.client.HTTPConnection("127.0.0.1", self.PORT, timeout=PATIENCE)
        for connection in (self.kept, fresh):
            self.state["hits"] += 1
            same(self.ask(connection), self.state)
        fresh.close()


class Sqlite:
    def __init__(self):
        self.writer = sqlite3.connect("/var/tmp/everything.db", isolation_level=None)
        self.writer.execute("PRAGMA journal_mode=WAL")
        self.writer.execute("CREATE TABLE rows (n INTEGER PRIMARY KEY, text TEXT)")
        self.reader = sqlite3.connect("/var/tmp/everything.db", isolation_level=None)
        self.committed, self.rows, self.checks = self.count(self.reader), 0, 0
        self.writer.execute("BEGIN IMMEDIATE")
        self.add(100)

    def add(self, count):
        for _ in range(count):
            self.rows += 1
            self.writer.execute("INSERT INTO rows VALUES (?, ?)", (self.rows, f"row {self.rows}"))

    def count(self, connection):
        return connection.execute("SELECT count(*) FROM rows").fetchone()[0]

    def check(self):
        same(self.writer.in_transaction, True)
        same((self.count(self.writer), self.count(self.reader)), (self.rows, self.committed))
        same(os.path.exists("/var/tmp/everything.db-wal"), True)
        self.checks += 1
        if self.checks % 2:
            self.writer.execute("COMMIT")
            self.committed = self.rows
        else:
            self.writer.execute("ROLLBACK")
            self.rows = self.committed
        same((self.count(self.writer), self.count(self.reader)), (self.rows, self.committed))
        same(self.reader.execute("PRAGMA integrity_check").fetchone()[0], "ok")
        self.writer.execute("BEGIN IMMEDIATE")
        self.add(100)


class Shell:
    """A bash with jobs in the background, one of them a pipeline between two fifos."""

    SETUP = """
        set -m; cd /srv; mark=of-bash
        sleep 86400 &
        { n=0; while read -r line; do n=$((n+1)); echo "$n:$line"; done | sed -u s/^/seen-/; } </tmp/in >/tmp/out &
    """

    def __init__(self):
        os.mkfifo("/tmp/in")
        os.mkfifo("/tmp/out")
        self.input = os.open("/tmp/in", os.O_RDWR)
        self.output = open(os.open("/tmp/out", os.O_RDWR), "rb", buffering=0)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.bash = subprocess.Popen(["bash", "--norc"], **pipes, text=True, bufsize=1)
        self.bash.stdin.write(self.SETUP)
        self.jobs = self.ask("jobs -p")
        self.lines = 0
        self.leave()

    def ask(self, line):
        self.bash.stdin.write(f"echo $({line})\n")
        return self.bash.stdout.readline().strip()

    def leave(self):
        self.lines += 1
        os.write(self.input, b"left\n")
        wait_for("the pipeline", lambda: select.select([self.output], [], [], 0)[0])

    def line(self):
        text = b""
        while not text.endswith(b"\n"):
            if not select.select([self.output], [], [], PATIENCE)[0]:
                raise AssertionError(f"the pipeline said only {text!r}")
            text += self.output.read(1)
        return text.decode().strip()

    def check(self):
        same(self.line(), f"seen-{self.lines}:left")
        self.lines += 1
        os.write(self.input, b"now\n")
        same(self.line(), f"seen-{self.lines}:now")
        same(self.ask("echo $mark $PWD; jobs -rp | wc -l"), "of-bash /srv 2")
        same(self.ask("jobs -p"), self.jobs)
        self.leave()


class Screen:
    """A program on a terminal of its own."""

    def __init__(self, command):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm"
            os.execvp(command[0], command)
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.shown = b""

    def types(self, keys):
        os.write(self.terminal, keys)

    def shows(self, text):
        def look():
            while select.select([self.terminal], [], [], 0)[0]:
                self.shown += os.read(self.terminal, 65536)
            return text in self.shown

        try:
            wait_for(text, look)
        except AssertionError as error:
            raise AssertionError(f"{error} in {self.shown[-500:]!r}") from None

    def settings(self):
        size = fcntl.ioctl(self.terminal, termios.TIOCGWINSZ, bytes(8))
        return termios.tcgetattr(self.terminal), size, os.getpgid(self.pid)


class Curses:
    """A full-screen program that shows whatever was typed, and all of it again at ctrl-l."""

    def __init__(self):
        self.screen = Screen(["python3", f"{HERE}/editor.py"])
        self.screen.shows(b"<>")
        self.text = b"begin"
        self.screen.types(self.text + b"\x0c")
        self.screen.shows(b"<begin>")
        self.settings = self.screen.settings()

    def check(self):
        same(self.screen.settings(), self.settings)
        word = b"." + str(len(self.text)).encode()
        self.text += word
        self.screen.types(word)
        self.screen.shown = b""
        self.screen.types(b"\x0c")
        self.screen.shows(b"<" + self.text + b">")
        os.kill(self.screen.pid, 0)


class Vim:
    """In insert mode while it sleeps; what it writes is all that was ever typed into it."""

    HOME = "/opt/vim"

    def __init__(self):
        loader = [f"{self.HOME}/loader", "--library-path", self.HOME]
        vim = [f"{self.HOME}/vim", "-u", "NONE", "-i", "NONE", "-n", "-N", "/tmp/vim.txt"]
        self.screen = Screen(loader + vim)
        self.screen.shows(b"[New]")
        self.text = "begin"
        self.screen.types(b"ibegin")
        self.screen.shows(b"begin")
        self.settings = self.screen.settings()

    def check(self):
        same(self.screen.settings(), self.settings)
        word = f" word-{len(self.text)}"
        self.text += word
        self.screen.types(word.encode() + b"\x1b:w!\ra")
        wait_for(f"vim to write {self.text}, not {self.written()}", lambda: self.written() == self.text)

    def written(self):
        try:
            with open("/tmp/vim.txt") as file:
                return file.read().strip()
        except FileNotFoundError:
            return None


class UnixSockets:
    def __init__(self):
        self.listeners, self.pairs, self.left = [], [socket.socketpair()], []
        for address in ("/run/everything.stream", "\0everything"):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(address)
            listener.listen()
            self.listeners.append(listener)
            self.pairs.append(self.connected(listener))
        self.pairs.append(socket.socketpair(type=socket.SOCK_SEQPACKET))
        self.pairs.append(socket.socketpair(type=socket.SOCK_DGRAM))
        self.leave()

    def connected(self, listener):
        client = socket.socket(socket.AF_UNIX)
        client.connect(listener.getsockname())
        return client, listener.accept()[0]

    def leave(self):
        self.left = [os.urandom(1000) for _ in self.pairs]
        for (near, _), bytes_ in zip(self.pairs, self.left):
            near.sendall(bytes_)

    def check(self):
        for (near, far), bytes_ in zip(self.pairs, self.left):
            far.settimeout(PATIENCE)
            near.settimeout(PATIENCE)
            same(far.recv(2000), bytes_)
            far.sendall(b"back")
            same(near.recv(2000), b"back")
        for listener in self.listeners:
            near, far = self.connected(listener)
            near.sendall(b"new")
            same(far.recv(10), b"new")
            near.close()
            far.close()
        self.leave()


class Inotify:
    CREATE, NONBLOCK = 0x100, 0o4000

    def __init__(self):
        os.mkdir("/tmp/watched")
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(self.NONBLOCK)
        same(libc.inotify_add_watch(self.descriptor, b"/tmp/watched", self.CREATE) > 0, True)
        self.count = 0
        self.make("left")

    def make(self, name):
        self.count += 1
        open(f"/tmp/watched/{name}-{self.count}", "w").close()

    def names(self):
        same(select.select([self.descriptor], [], [], PATIENCE)[0], [self.descriptor])
        events, names = os.read(self.descriptor, 65536), []
        while events:
            _, mask, _, length = struct.unpack_from("iIII", events)
            same(mask, self.CREATE)
            names.append(events[16 : 16 + length].rstrip(b"\0").decode())
            events = events[16 + length :]
        return names

    def check(self):
        same(self.names(), [f"left-{self.count}"])
        self.make("now")
        same(self.names(), [f"now-{self.count}"])
        self.make("left")


class Server:
    """A server on asyncio: it numbers the words of each connection. One connection is kept."""

    PORT = 7200

    def __init__(self):
        self.process = subprocess.Popen(["python3", f"{HERE}/server.py", str(self.PORT)])
        self.kept, self.asked = connect(self.PORT), 0
        self.kept.sendall(b"left\n")

    def check(self):
        self.kept.settimeout(PATIENCE)
        self.asked += 1
        same(self.kept.recv(100), f"{self.process.pid} {self.asked} left\n".encode())
        with connect(self.PORT) as fresh:
            fresh.sendall(b"hello\n")
            same(fresh.recv(100), f"{self.process.pid} 1 hello\n".encode())
        self.kept.sendall(b"left\n")


class Files:
    """On the overlay: made, changed, removed from the image, linked, unlinked and still open, locked."""

    def __init__(self):
        os.makedirs("/srv/tree/deep")
        os.symlink("../plain", "/srv/tree/deep/link")
        with open("/srv/tree/plain", "wb") as file:
            file.write(os.urandom(3 << 20))
        os.link("/srv/tree/plain", "/srv/tree/hard")
        os.chmod("/srv/tree/plain", 0o4750)
        os.chown("/srv/tree/plain", 1234, 5678)
        os.utime("/srv/tree/plain", ns=(1, 1_600_000_000_123_456_789))
        os.remove("/etc/debian_version")
        with open("/etc/issue", "a") as file:
            file.write("changed\n")
        self.open = open("/srv/tree/open", "w+b")
        self.open.write(os.urandom(100_000))
        self.open.seek(12_345)
        os.remove("/srv/tree/open")
        self.locked = open("/srv/tree/locked", "w")
        fcntl.flock(self.locked, fcntl.LOCK_EX)
        self.was = self.now()

    def now(self):
        about = os.stat("/srv/tree/plain")
        with open("/srv/tree/deep/link", "rb") as file:
            content = hashlib.sha256(file.read()).hexdigest()
        here = self.open.tell()
        rest = hashlib.sha256(self.open.read()).hexdigest()
        self.open.seek(here)
        with open("/etc/issue") as file:
            issue = file.read()
        about = about.st_mode, about.st_uid, about.st_gid, about.st_nlink, about.st_mtime_ns, about.st_size
        return about, content, here, rest, issue, sorted(os.listdir("/srv/tree"))

    def check(self):
        same(self.now(), self.was)
        same(os.path.exists("/etc/debian_version"), False)
        with open("/srv/tree/locked") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                raise AssertionError("the lock is lost")
            except BlockingIOError:
                pass


class SharedMemory:
    """A file in /dev/shm that a child counts in, and one that has no name any more."""

    def __init__(self):
        with open("/dev/shm/count", "w+b") as file:
            file.truncate(4096)
            self.shared = mmap.mmap(file.fileno(), 4096)
        self.bytes = os.urandom(4 << 20)
        with open("/dev/shm/bytes", "wb") as file:
            file.write(self.bytes)
        self.open = open("/dev/shm/open", "w+b", buffering=0)
        self.open.write(b"still here")
        os.remove("/dev/shm/open")
        self.child = os.fork()
        if self.child == 0:
            while True:
                struct.pack_into("Q", self.shared, 0, self.count() + 1)
                time.sleep(0.02)

    def count(self):
        return struct.unpack_from("Q", self.shared)[0]

    def check(self):
        before = self.count()
        wait_for("the child", lambda: self.count() > before)
        with open("/dev/shm/bytes", "rb") as file:
            same(file.read() == self.bytes, True)
        self.open.seek(0)
        same(self.open.read(), b"still here")


class Events:
    """An epoll list with an eventfd that is ready, and a timer that ticks."""

    def __init__(self):
        self.ticks = 0
        signal.signal(signal.SIGALRM, self.tick)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        self.epoll = select.epoll()
        self.epoll.register(self.event, select.EPOLLIN)
        os.eventfd_write(self.event, 7)

    def tick(self, *_):
        self.ticks += 1

    def check(self):
        same(self.epoll.poll(PATIENCE), [(self.event, select.EPOLLIN)])
        same(os.eventfd_read(self.event), 7)
        same(self.epoll.poll(0), [])
        before = self.ticks
        wait_for("the timer", lambda: self.ticks > before)
        os.eventfd_write(self.event, 7)


class ThousandFiles:
    """Written last before the answer, so just before the sleep."""

    def __init__(self):
        self.round = 0
        self.write()

    def write(self):
        self.round += 1
        self.was = {f"{n}": f"{self.round} {n} ".encode() * (n % 300) for n in range(1000)}
        os.mkdir(f"/srv/round-{self.round}")
        for name, content in self.was.items():
            with open(f"/srv/round-{self.round}/{name}", "wb") as file:
                file.write(content)

    def check(self):
        here = f"/srv/round-{self.round}"
        same(sorted(os.listdir(here)), sorted(self.was))
        for name, content in self.was.items():
            with open(f"{here}/{name}", "rb") as file:
                same(file.read(), content)
            os.remove(f"{here}/{name}")
        os.rmdir(here)
        same(os.path.exists(here), False)
        self.write()


ITEMS = [
    Identity, Heap, Threads, Node, Sqlite, Shell, Curses, UnixSockets, Inotify, Server, Files,
    SharedMemory, Events, ThousandFiles,
]


def verdict(item):
    try:
        item.check()
    except Exception as error:  # whatever it is, it is this item's verdict
        return f"{type(error).__name__}: {error}"
    return "ok"


def serve():
    kinds = ITEMS + ([Vim] if os.path.exists(Vim.HOME) else [])
    items = [kind() for kind in kinds]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET)
    listener.listen()
    while True:
        client, _ = listener.accept()
        # Descriptors are counted while this connection is open, always alike.
        verdicts = {type(item).__name__: verdict(item) for item in items}
        client.sendall(json.dumps(verdicts).encode())
        client.close()


def check():
    client = socket.socket(socket.AF_UNIX)
    client.connect(SOCKET)
    with client.makefile() as answer:
        print(answer.read())


if __name__ == "__main__":
    check() if "check" in sys.argv else serve()
