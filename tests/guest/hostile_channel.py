"""Says something to the daemon in the agent's place: takes a copy of its channel where the kernel gives one out, and
makes the agent send where it does not. Argument: what to say, and the engine. Ends with 77 if it can't speak at all."""

import ctypes
import json
import os
import socket
import struct
import sys
import time

HELLO, OPEN, REPLY, DATA, CREDIT, END, RESET = 0, 1, 2, 3, 5, 6, 7
MAX = 128 * 1024
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long
NASTY = "\x1b]0;owned\x07\x1b[2J\r\n\x00" + "A" * 60000


def frame(stream, kind, payload=b""):
    payload = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return struct.pack("<IB", stream, kind) + payload


SAYINGS = {
    "hello": lambda: [frame(0, HELLO, {"version": v, "session": s}) for v in (0, 1, 99) for s in (0, 1, 2**64 - 1)],
    "garbage": lambda: [b"\x00\x00\x00\x00\xee" + os.urandom(1000)],
    "half": lambda: [b"\x01", b"\x01\x00\x00\x00", b""],
    "large": lambda: [frame(1, DATA, b"x" * (MAX + 4096)) for _ in range(8)],
    "streams": lambda: [frame(n, kind, b"\x01\x00\x00\x00") for n in (1, 2, 77, 2**31, 2**32 - 1)
                        for kind in (DATA, CREDIT, END, RESET)],
    "credit": lambda: [frame(n, CREDIT, struct.pack("<I", 2**32 - 1)) for n in range(200)],
    "reply": lambda: [frame(n, REPLY, {"is": "failed", "code": NASTY, "message": NASTY}) for n in range(1, 60)],
    "deep": lambda: [frame(n, REPLY, b"[" * 100000) for n in range(1, 300)],
    "failed": lambda: (frame(n, REPLY, {"is": "failed", "code": "invalid", "message": NASTY}) for n in range(1, 1500)),
    "flood": lambda: (frame(n % 4000, DATA, b"x" * MAX) for n in range(2000)),
}


def escaped(packet):
    """As it goes over the serial port of a microVM."""
    body = packet.replace(b"\xdb", b"\xdb\xdd").replace(b"\xc0", b"\xdb\xdc")
    return b"\xc0" + body + b"\xdb\xde"


def number_of_channel(microvm):
    """The agent's descriptor: a socket without a name, or the port."""
    for number in range(3, 64):
        try:
            target = os.readlink(f"/proc/1/fd/{number}")
        except OSError:
            continue
        if target.startswith("/dev/vport") if microvm else target.startswith(("socket:", "host:")):
            return number
    return 3


def borrowed(number):
    agent = libc.syscall(434, 1, 0)
    fd = libc.syscall(438, agent, number, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return fd


class Regs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in (
        "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base "
        "ds es fs gs").split()]


class Puppet:
    """The agent, made to call the system by its tracer."""

    def __init__(self):
        self.call(16, None, None)  # attach
        os.waitpid(1, 0x40000000)
        self.saved = self.registers()
        self.gate = self.find_gate()
        self.area = self.syscall(9, 0, 1 << 20, 3, 0x22, 2**64 - 1, 0)
        self.held = b""

    @staticmethod
    def find_gate():
        """Where the agent's program has a system call: its code is not changed."""
        with open("/proc/1/maps") as maps:
            for line in maps:
                fields = line.split()
                if "x" in fields[1] and fields[-1].endswith("agent"):
                    start, end = (int(part, 16) for part in fields[0].split("-"))
                    with open("/.torpor/agent", "rb") as program:
                        program.seek(int(fields[2], 16))
                        # Followed by a look at its result: not two bytes within another instruction.
                        return start + program.read(end - start).rindex(b"\x0f\x05\x48\x3d")
        raise OSError(2, "the agent's program is not found")

    def poke(self, address, data):
        for at in range(0, len(data), 8):
            word = int.from_bytes(data[at:at + 8].ljust(8, b"\0"), "little")
            self.call(5, address + at, word)

    @staticmethod
    def call(request, address, data):
        if libc.ptrace(request, 1, address, data) < 0:
            raise OSError(ctypes.get_errno(), f"ptrace {request}")

    def registers(self):
        regs = Regs()
        self.call(12, None, ctypes.addressof(regs))
        return regs

    def syscall(self, number, *arguments):
        regs = Regs.from_buffer_copy(self.saved)
        regs.rax, regs.orig_rax, regs.rip = number, 2**64 - 1, self.gate
        for name, value in zip("rdi rsi rdx r10 r8 r9".split(), arguments):
            setattr(regs, name, value)
        self.call(13, None, ctypes.addressof(regs))
        for _ in ("enter", "leave"):
            self.call(24, None, None)  # until the next system call
            os.waitpid(1, 0x40000000)
        return self.registers().rax

    def send(self, number, packet):
        # Most of a packet is as the one before.
        same = packet[8:] == self.held[8:]
        self.poke(self.area, packet[:8] if same else packet)
        self.held = packet
        return self.syscall(44, number, self.area, len(packet), 0x40, 0, 0)

    def let_go(self):
        self.call(13, None, ctypes.addressof(self.saved))
        self.call(17, None, None)


def speak(packets, microvm):
    number = number_of_channel(microvm)
    try:
        fd = borrowed(number)
    except OSError as error:
        print("no copy:", error, flush=True)
        puppet = Puppet()
        # So long it stands still, and questions of the daemon wait.
        time.sleep(2 if sys.argv[1] == "failed" else 0)
        sent = [puppet.send(number, packet[:1 << 20]) for packet in packets]
        puppet.let_go()
        print("sent by the agent:", [ctypes.c_longlong(n).value for n in sent][:20], flush=True)
        return
    if microvm:
        os.set_blocking(fd, True)
        for packet in packets:
            os.write(fd, escaped(packet))
    else:
        channel = socket.socket(fileno=fd)
        for packet in packets:
            channel.send(packet)
    print("sent", flush=True)


try:
    speak(SAYINGS[sys.argv[1]](), sys.argv[2] == "microvm")
except OSError as error:
    print("nothing can be said:", error, flush=True)
    sys.exit(77)
