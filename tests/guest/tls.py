"""TLS between two processes: `tls.py serve PORT` answers every line in capitals; `tls.py ask PORT` makes
a fresh connection, verifies the server, and prints the protocol and the answer. The server also keeps a
connection to itself and uses it for every answer."""

import socket
import ssl
import subprocess
import sys
import threading

KEY, CERTIFICATE = "/tmp/tls.key", "/tmp/tls.crt"


def connect(port):
    context = ssl.create_default_context(cafile=CERTIFICATE)
    plain = socket.create_connection(("127.0.0.1", port), 10)
    return context.wrap_socket(plain, server_hostname="localhost")


def exchange(connection, line):
    connection.sendall(line + b"\n")
    return connection.makefile("rb").readline().strip()


def answer(connection, kept):
    for line in connection.makefile("rb"):
        # Whoever asks the server asks it also over the connection that was there before.
        before = exchange(kept(), b"kept") + b" " if kept else b""
        connection.sendall(before + line.upper())


def serve(port):
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", *request.split(), *names, "-keyout", KEY, "-out", CERTIFICATE]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    # On a port that nobody else knows, and before anybody is answered.
    inner = socket.create_server(("127.0.0.1", 0))
    own = []
    connecting = threading.Thread(target=lambda: own.append(connect(inner.getsockname()[1])))
    connecting.start()
    first = context.wrap_socket(inner.accept()[0], server_side=True)
    connecting.join()
    threading.Thread(target=answer, args=(first, None), daemon=True).start()
    listener = socket.create_server(("127.0.0.1", port))
    while True:
        connection = context.wrap_socket(listener.accept()[0], server_side=True)
        threading.Thread(target=answer, args=(connection, lambda: own[0]), daemon=True).start()


if sys.argv[1] == "serve":
    serve(int(sys.argv[2]))
else:
    connection = connect(int(sys.argv[2]))
    print(connection.version(), exchange(connection, b"hello").decode())
