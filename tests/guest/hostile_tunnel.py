"""Attempts of a sandbox without internet to get a word out."""

import os
import socket
import struct

from attempts import CONFIG, attempt, each

OUTSIDE = CONFIG["outside"]


def question(name):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\x00" + struct.pack("!HH", 16, 1)


def servers():
    with open("/etc/resolv.conf") as file:
        return [line.split()[1] for line in file if line.startswith("nameserver")] + ["10.0.0.1", OUTSIDE]


def ask(server, kind, name):
    with socket.socket(socket.AF_INET, kind) as s:
        s.settimeout(1)
        s.connect((server, 53))
        text = question(name)
        s.sendall(struct.pack("!H", len(text)) + text if kind == socket.SOCK_STREAM else text)
        answer = s.recv(500)
    # A refusal is made on this host: nobody else heard the question.
    answer = answer[2:] if kind == socket.SOCK_STREAM else answer
    return answer if len(answer) > 4 and answer[3] & 15 == 0 else None


@attempt("tunnel through names without internet")
def _():
    name = f"{os.urandom(20).hex()}.tunnel.test"
    return each(lambda s=s, k=k: ask(s, k, name) for s in servers() for k in (socket.SOCK_DGRAM, socket.SOCK_STREAM))


@attempt("connect outside without internet")
def _():
    def connect(port):
        with socket.create_connection((OUTSIDE, port), 1) as s:
            return s.recv(10) or None
    return each(lambda p=p: connect(p) for p in (53, 80, 443, 8000))


@attempt("send datagrams outside without internet")
def _():
    def send(port):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(0.5)
            s.sendto(b"word", (OUTSIDE, port))
            return s.recv(100)
    return each(lambda p=p: send(p) for p in (443, 8000, 123))
