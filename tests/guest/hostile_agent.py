"""Attempts on the agent, which is the first process of the machine and speaks with the daemon. A root user may do
to it what it likes: the harm is its own. What is judged here is that the agent, or at least the sandbox's state,
stays well; the host asks afterwards."""

import array
import ctypes
import glob
import json
import os
import shutil
import socket

from attempts import BOTH, Own, attempt, each, libc, syscall

AGENT = "/.torpor/agent"
SUDO = "/run/torpor/sudo"


@attempt("trace the agent", own=BOTH)
def _():
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    if libc.ptrace(0x4206, 1, 0, 0) != 0:  # seize
        raise OSError(ctypes.get_errno(), "ptrace")
    libc.ptrace(17, 1, 0, 0)
    return Own("the agent of its own machine")


@attempt("read the agent's memory", own=BOTH)
def _():
    with open("/proc/1/maps") as maps:
        start = int(maps.readline().split("-")[0], 16)
    with open("/proc/1/mem", "rb", buffering=0) as memory:
        memory.seek(start)
        return Own(f"{len(memory.read(4096))} bytes")


@attempt("borrow the agent's descriptors", own=BOTH)
def _():
    def borrow(number):
        agent = syscall(434, 1, 0)
        return Own(f"descriptor {syscall(438, agent, number, 0)}")
    return each([lambda n=n: borrow(n) for n in range(3, 12)]
                + [lambda p=p: Own(f"{p} {os.close(os.open(p, os.O_RDWR | os.O_NONBLOCK))}")
                   for p in glob.glob("/proc/1/fd/*")])


@attempt("open the agent's channel a second time")
def _():
    def taken(path):
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        os.write(fd, b"\xc0" + b"\x00" * 5 + b"\xdb\xde")
        return path
    return each(lambda p=p: taken(p) for p in glob.glob("/dev/vport*") + glob.glob("/dev/virtio-ports/*"))


@attempt("replace the agent's program", own=BOTH)
def _():
    got = None
    try:
        with open(AGENT, "r+b") as program:
            program.write(b"#!/bin/sh\n")
        got = Own("its bytes")
    except OSError:
        pass
    try:
        shutil.copy("/bin/sh", "/.torpor/other")
        os.rename("/.torpor/other", AGENT)
        got = Own("its name")
    except OSError:
        pass
    return got


@attempt("hide the agent's program below a mount", own=BOTH)
def _():
    os.makedirs("/tmp/over", exist_ok=True)
    if libc.mount(b"/tmp/over", b"/.torpor", b"", 4096, None) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    libc.umount2(b"/.torpor", 2)
    return Own("a mount over it")


def sudo():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.settimeout(5)
    s.connect(SUDO)
    return s


@attempt("send garbage to the agent's sudo")
def _():
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))]
    wish = {"command": ["id"], "cwd": "/", "env": {}, "user": "root"}
    packets = [(b"", []), (b"\xff" * 60000, []), (b"{" * 50000, []), (b"[" * 50000, []), (json.dumps(wish).encode(), []),
               (json.dumps(wish).encode(), rights), (json.dumps(wish | {"command": []}).encode(), []),
               (json.dumps(wish | {"cwd": "\0"}).encode(), []), (json.dumps(wish | {"user": "../.."}).encode(), [])]
    for bytes_, more in packets:
        try:
            with sudo() as s:
                s.sendmsg([bytes_], more)
                answer = s.recv(4096)
                if b"uid=" in answer or b"started" in answer:
                    return answer
        except OSError:
            pass
    return None


@attempt("keep the agent's sudo busy", own=BOTH)
def _():
    kept = []
    try:
        while len(kept) < 3000:
            kept.append(sudo())
    except OSError as error:
        return Own(f"{len(kept)} connections, then {error!r}")
    return Own(f"{len(kept)} connections")


@attempt("pass the agent its own socket", own=BOTH)
def _():
    with sudo() as s, sudo() as other:
        wish = {"command": ["cat"], "cwd": "/", "env": {}, "user": "root"}
        rights = array.array("i", [other.fileno()] * 3)
        s.sendmsg([json.dumps(wish).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        return Own("a command whose words go to the agent itself")


@attempt("remove the agent's files in /run", own=BOTH)
def _():
    os.rename("/run/torpor", "/run/elsewhere")
    os.symlink("/etc", "/run/torpor")
    os.unlink("/run/torpor")
    os.rename("/run/elsewhere", "/run/torpor")
    return Own("their names, for a moment")
