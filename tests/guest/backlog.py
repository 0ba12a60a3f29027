"""A server on PORT that accepts nobody until /tmp/accept exists, and more clients than it has room for:
some that do not wait, and one that does and tells in /tmp/waited what came of it. Other connections are
whole."""

import os
import socket
import sys
import threading
import time

ADDRESS = ("127.0.0.1", int(sys.argv[1]))


def wait():
    client = socket.socket()
    try:
        client.connect(ADDRESS)
        said = "connected"
    except OSError as error:
        said = str(error)
    with open("/tmp/waited", "w") as file:
        file.write(f"{said}\n")


listener = socket.socket()
listener.bind(ADDRESS)
listener.listen(1)
other = socket.create_server(("127.0.0.1", 0))
held = []
for _ in range(20):
    client = socket.socket()
    client.setblocking(False)
    client.connect_ex(ADDRESS)
    held += [client, socket.create_connection(other.getsockname()), other.accept()]
threading.Thread(target=wait, daemon=True).start()
while not os.path.exists("/tmp/accept"):
    time.sleep(0.05)
while True:
    held.append(listener.accept())
