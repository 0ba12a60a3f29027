"""What hostile programs have in common: a list of attempts, each made in a process of its own.

An attempt says in its own words what it got. Nothing, or an error of the system: it held. `Own`: something of
its own machine, which is no harm where it says so (a microVM has a kernel, devices and a clock of its own).
Anything else went through."""

import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback

GVISOR, MICROVM = "gvisor", "microvm"
BOTH = (GVISOR, MICROVM)
CONFIG = json.loads(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].startswith("{") else {}
# Emulated machines are slow.
PATIENCE = 90 if CONFIG.get("engine") == MICROVM else 30
ATTEMPTS = []
libc = ctypes.CDLL(None, use_errno=True)


class Own(str):
    """What was reached is part of the machine that reached for it."""


def attempt(name, own=()):
    """Adds an attempt; `own`: the engines on which it may get something of its own machine."""
    def add(work):
        ATTEMPTS.append((name, own, work))
        return work
    return add


def syscall(number, *arguments):
    """A system call without a wrapper; an error is an OSError."""
    arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def each(works):
    """The first that went through, else what was its own, else nothing."""
    best = None
    for work in works:
        try:
            got = work()
        except OSError:
            continue
        if got is not None and not isinstance(got, Own):
            return got
        best = best or got
    return best


def judge(own, work):
    try:
        got = work()
    except (OSError, MemoryError, EOFError) as error:
        return "held", repr(error)[:200]
    except BaseException:
        return "broken", traceback.format_exc()[-1000:]
    if got is None:
        return "held", "nothing"
    if isinstance(got, Own):
        return ("held" if CONFIG["engine"] in own else "through"), "its own: " + got[:200]
    return "through", repr(got)[:500]


def make(name, own, work):
    """In a process of its own, because it may end badly."""
    began = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.write(writer, json.dumps(judge(own, work)).encode())
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], PATIENCE)
    said = os.read(reader, 65536) if ready else None
    os.close(reader)
    try:
        os.killpg(child, signal.SIGKILL)
    except OSError:
        pass
    _, status = os.waitpid(child, 0)
    if said is None:
        outcome, detail = "hung", f"after {PATIENCE} seconds"
    elif not said:
        outcome, detail = "held", f"it was ended: status {status}"
    else:
        outcome, detail = json.loads(said)
    took = round(time.monotonic() - began, 1)
    print(json.dumps({"name": name, "outcome": outcome, "detail": detail, "seconds": took}), flush=True)


def run():
    for name, own, work in ATTEMPTS:
        make(name, own, work)
