"""Two connections to HOST PORT, and what becomes of them: one that is being read, and one that is used
again only when /tmp/go exists. Each tells its story in /tmp/reader or /tmp/writer."""

import errno
import os
import socket
import sys
import threading
import time

ADDRESS = (sys.argv[1], int(sys.argv[2]))


def tell(who, text):
    with open(f"/tmp/{who}", "a") as file:
        file.write(text + "\n")


def read(connection):
    while connection.recv(100):
        pass


def write(connection):
    while not os.path.exists("/tmp/go"):
        time.sleep(0.05)
    for _ in range(100):
        connection.sendall(b"still there?")
        time.sleep(0.05)


def story(who, use):
    connection = socket.create_connection(ADDRESS, 20)
    connection.settimeout(None)
    tell(who, connection.recv(100).decode().strip())
    try:
        use(connection)
        tell(who, "saw the end of the stream")
    except OSError as error:
        tell(who, f"saw {errno.errorcode.get(error.errno, error)}")
    with socket.create_connection(ADDRESS, 20) as connection:
        tell(who, "again " + connection.recv(100).decode().strip())


for who, use in [("reader", read), ("writer", write)]:
    threading.Thread(target=story, args=(who, use)).start()
