"""Keeps the servers of server.js and server.py busy with connections that come and go, and tells in
/tmp/load.json how many were answered rightly and what went wrong.

While /tmp/calm exists no connection is made, and the open ones are used on and on; `calm` says when it
has come to that."""

import http.client
import json
import os
import random
import socket
import sys
import threading
import time

NODE, ASYNCIO = int(sys.argv[1]), int(sys.argv[2])
PATIENCE = 20
CALM = "/tmp/calm"
right, wrong, making = [0, 0], [], 0
count = threading.Lock()


class Making:
    """Held while a connection is made."""

    def __enter__(self):
        global making
        while True:
            with count:
                if not os.path.exists(CALM):
                    making += 1
                    return
            time.sleep(0.01)

    def __exit__(self, *_):
        global making
        with count:
            making -= 1


def uses():
    """Numbers from 1: a few, or as many as it takes until the calm is over."""
    for n in range(1, random.randint(2, 6)):
        yield n
    while os.path.exists(CALM):
        n += 1
        yield n
        time.sleep(0.01)


def node(number):
    connection = http.client.HTTPConnection("127.0.0.1", NODE, timeout=PATIENCE)
    with Making():
        connection.connect()
        # The server has taken the connection when it answers.
        connection.request("GET", f"/{number}")
        connection.getresponse().read()
    for n in uses():
        connection.request("GET", f"/{number}/{n}")
        answer = connection.getresponse().read().decode()
        assert answer == f"hello /{number}/{n}\n", answer
        right[0] += 1
    connection.close()


def asyncio(number):
    with Making():
        connection = socket.create_connection(("127.0.0.1", ASYNCIO), PATIENCE)
        answers = connection.makefile()
        connection.sendall(b"first\n")
        answers.readline()
    for n in uses():
        connection.sendall(f"word-{number}\n".encode())
        _, numbered, word = answers.readline().split()
        assert (int(numbered), word) == (n + 1, f"word-{number}"), (numbered, word)
        right[1] += 1
    answers.close()
    connection.close()


def work(ask):
    number = 0
    while True:
        number += 1
        try:
            ask(number)
        except Exception as error:  # whatever it is, the test wants to hear of it
            wrong.append(f"{ask.__name__}: {type(error).__name__}: {error}")
        time.sleep(random.random() / 50)


for _ in range(4):
    for ask in (node, asyncio):
        threading.Thread(target=work, args=(ask,), daemon=True).start()
while True:
    with open("/tmp/load.new", "w") as file:
        with count:
            calm = os.path.exists(CALM) and making == 0
        json.dump({"right": right, "wrong": wrong[:20], "calm": calm}, file)
    os.replace("/tmp/load.new", "/tmp/load.json")
    time.sleep(0.05)
