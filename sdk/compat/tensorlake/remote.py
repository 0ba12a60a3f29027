"""The daemon under an address that is not this host's own: a relay on 127.0.0.2.

The package treats `localhost` and `127.0.0.1` in a special way; everything else is elsewhere to it.
"""

import contextlib
import socket
import threading

ADDRESS = "127.0.0.2"


@contextlib.contextmanager
def relay(port):
    """The port of a listener on 127.0.0.2 that passes everything on to our daemon."""
    listener = socket.create_server((ADDRESS, 0))
    threading.Thread(target=accept, args=(listener, port), daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        # Wakes the thread that waits in accept, which a close alone does not.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def accept(listener, port):
    with contextlib.suppress(OSError):
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", port))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=pump, args=(source, sink), daemon=True).start()


def pump(source, sink):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
