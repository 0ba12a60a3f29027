"""A desktop as small as it can be: RFB 3.8 with VncAuth, one picture, and a file of what was done to it.

Runs inside a sandbox, on the standard library. Usage: rfb_server.py PORT EVENTS
"""

import json
import socketserver
import struct
import sys

WIDTH, HEIGHT = 64, 48
CHALLENGE = bytes(range(16))
# What DES makes of the challenge with the password "tensorlake"; there is no DES in the standard library.
RESPONSE = bytes.fromhex("fc4e5972444d1dcd6e82c9d7975d61ba")
RAW = 0


def picture(left, top, width, height):
    """The left half is red and the right half blue, but for one green point at 3, 2."""
    rows = []
    for y in range(top, top + height):
        for x in range(left, left + width):
            colour = 0x00FF00 if (x, y) == (3, 2) else 0xFF0000 if x < WIDTH // 2 else 0x0000FF
            rows.append(struct.pack("<I", colour))
    return b"".join(rows)


class Session(socketserver.StreamRequestHandler):
    def take(self, size):
        data = self.rfile.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def note(self, **event):
        with open(sys.argv[2], "a") as events:
            print(json.dumps(event), file=events)

    def handle(self):
        try:
            if self.greet():
                while True:
                    self.answer(self.take(1)[0])
        except (EOFError, ConnectionError):
            pass

    def greet(self):
        self.wfile.write(b"RFB 003.008\n")
        self.take(12)
        self.wfile.write(b"\x01\x02")
        self.take(1)
        self.wfile.write(CHALLENGE)
        if self.take(16) != RESPONSE:
            reason = b"wrong password"
            self.wfile.write(struct.pack(">II", 1, len(reason)) + reason)
            return False
        self.wfile.write(struct.pack(">I", 0))
        self.note(kind="begin", shared=self.take(1) == b"\x01")
        true_colour = struct.pack(">BBBBHHHBBBxxx", 32, 24, 0, 1, 255, 255, 255, 16, 8, 0)
        name = b"a small desktop"
        head = struct.pack(">HH", WIDTH, HEIGHT) + true_colour
        self.wfile.write(head + struct.pack(">I", len(name)) + name)
        return True

    def answer(self, kind):
        if kind == 0:  # SetPixelFormat: the one that we have is the one that is asked for.
            self.take(19)
        elif kind == 2:  # SetEncodings
            (count,) = struct.unpack(">xH", self.take(3))
            self.take(4 * count)
        elif kind == 3:  # FramebufferUpdateRequest
            _, x, y, width, height = struct.unpack(">BHHHH", self.take(9))
            head = struct.pack(">BxHHHHHi", 0, 1, x, y, width, height, RAW)
            self.wfile.write(head + picture(x, y, width, height))
        elif kind == 4:  # KeyEvent
            down, key = struct.unpack(">BxxI", self.take(7))
            self.note(kind="key", down=bool(down), key=key)
        elif kind == 5:  # PointerEvent
            buttons, x, y = struct.unpack(">BHH", self.take(5))
            self.note(kind="pointer", buttons=buttons, x=x, y=y)
        else:
            raise EOFError


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


Server(("127.0.0.1", int(sys.argv[1])), Session).serve_forever()
