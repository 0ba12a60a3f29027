"""A server that answers with the request it got, and keeps it in /tmp/seen. It tries to set the daemon's cookie."""

import socket
import threading


def serve(connection):
    connection.settimeout(2)
    request = b""
    try:
        while b"\r\n\r\n" not in request and len(request) < 1 << 20:
            more = connection.recv(65536)
            if not more:
                break
            request += more
    except OSError:
        pass
    with open("/tmp/seen", "ab") as seen:
        seen.write(request + b"\n--\n")
    head = (b"HTTP/1.1 200 OK\r\nSet-Cookie: torpor_preview=x; Domain=localhost; Path=/\r\n"
            b"Set-Cookie: TORPOR_PREVIEW=y\r\nSet-Cookie: own=1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n")
    try:
        connection.sendall(head % len(request) + request)
    except OSError:
        pass
    connection.close()


with socket.create_server(("127.0.0.1", 3000), backlog=100) as server:
    while True:
        threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
