"""Keeps the servers of server.js and server.py busy with connections that come and go, and tells in
/tmp/load.json how many were answered rightly and what went wrong."""

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
right, wrong = [0, 0], []


def node(number):
    connection = http.client.HTTPConnection("127.0.0.1", NODE, timeout=PATIENCE)
    for n in range(random.randint(1, 5)):
        connection.request("GET", f"/{number}/{n}")
        answer = connection.getresponse().read().decode()
        assert answer == f"hello /{number}/{n}\n", answer
    connection.close()


def asyncio(number):
    with socket.create_connection(("127.0.0.1", ASYNCIO), PATIENCE) as connection:
        answers = connection.makefile()
        for n in range(1, random.randint(2, 6)):
            connection.sendall(f"word-{number}\n".encode())
            _, count, word = answers.readline().split()
            assert (int(count), word) == (n, f"word-{number}"), (count, word)


def work(which, ask):
    number = 0
    while True:
        number += 1
        try:
            ask(number)
            right[which] += 1
        except Exception as error:  # whatever it is, the test wants to hear of it
            wrong.append(f"{ask.__name__}: {type(error).__name__}: {error}")
        time.sleep(random.random() / 50)


for _ in range(4):
    for which, ask in enumerate([node, asyncio]):
        threading.Thread(target=work, args=(which, ask), daemon=True).start()
while True:
    with open("/tmp/load.new", "w") as file:
        json.dump({"right": right, "wrong": wrong[:20]}, file)
    os.replace("/tmp/load.new", "/tmp/load.json")
    time.sleep(0.05)
