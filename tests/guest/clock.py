"""An HTTP server that tells what time it is for it: `/` the wall clock and the monotonic clock in
seconds, `/timer/N` sets a timer of N seconds, `/fired` the wall clock when the last one fired (0: not
yet), `/random` bytes of the kernel that this process draws."""

import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

fired = 0.0


def fire():
    global fired
    fired = time.time()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        global fired
        if self.path.startswith("/timer/"):
            fired = 0.0
            threading.Timer(float(self.path.rsplit("/", 1)[1]), fire).start()
            answer = "set"
        elif self.path == "/fired":
            answer = f"{fired:.6f}"
        elif self.path == "/random":
            answer = os.getrandom(16).hex()
        else:
            answer = f"{time.time():.6f} {time.monotonic():.6f}"
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
