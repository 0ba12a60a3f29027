"""What the tests have in common: waiting, names, raw HTTP, streams of events."""

import http.client
import itertools
import json
import os
import socket
import time
import urllib.parse

# Longer than anything here takes on a busy machine.
PATIENCE = 60
# Between two looks at something that changes by itself.
PAUSE = 0.02

BASE_IMAGE = "tensorlake/ubuntu-minimal"

_numbers = itertools.count(1)


def wait_for(what, look, patience=PATIENCE):
    """Asks until the answer is true, and returns it."""
    end = time.monotonic() + patience
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < end, f"waited {patience} s in vain for {what}"
        time.sleep(PAUSE)


def fresh_name(what="box"):
    """A sandbox name that nobody else in this run has."""
    return f"{what}-{os.getpid()}-{next(_numbers)}"


def server():
    """Host and port of the daemon under test."""
    parsed = urllib.parse.urlparse(os.environ["TENSORLAKE_API_URL"])
    return parsed.hostname, parsed.port


class Answer:
    """A whole HTTP answer."""

    def __init__(self, status, headers, body):
        self.status = status
        self.headers = {name.lower(): value for name, value in headers}
        self.body = body

    def json(self):
        return json.loads(self.body)

    def __repr__(self):
        return f"{self.status} {self.body[:2000]!r}"


def connection(timeout=PATIENCE):
    return http.client.HTTPConnection("127.0.0.1", server()[1], timeout=timeout)


def send(link, method, path, *, hosts=None, headers=None, body=None):
    """Sends one request; `hosts` are its Host headers, as many as there are."""
    if isinstance(body, (dict, list)):
        body = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
    link.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for host in hosts if hosts is not None else ["%s:%d" % server()]:
        link.putheader("Host", host)
    for name, value in (headers or {}).items():
        link.putheader(name, value)
    if body is not None or method in ("POST", "PUT", "PATCH"):
        link.putheader("Content-Length", str(len(body or b"")))
    link.endheaders(body)


def request(method, path, *, hosts=None, headers=None, body=None, timeout=PATIENCE):
    """One request to the daemon, to the byte as written here."""
    link = connection(timeout)
    try:
        send(link, method, path, hosts=hosts, headers=headers, body=body)
        response = link.getresponse()
        return Answer(response.status, response.getheaders(), response.read())
    finally:
        link.close()


def inside(sandbox, method, path, **extra):
    """One request to the daemon inside a sandbox, routed by `Host: <id or name>.local`."""
    return request(method, path, hosts=[f"{sandbox}.local"], **extra)


def lifecycle(method, path, **extra):
    """One request to the lifecycle API, under the prefix with the namespace."""
    return request(method, f"/v1/namespaces/default{path}", **extra)


def own(method, path, **extra):
    """One request to Torpor's own API."""
    return request(method, f"/v1{path}", **extra)


def own_list(what):
    """What Torpor's own API lists: `sandboxes`, `snapshots`, `pools` or `drives`."""
    answer = own("GET", f"/{what}")
    assert answer.status == 200, answer
    return answer.json()["volumes" if what == "drives" else what]


def upgrade(path, *, hosts, headers=None):
    """Asks for a WebSocket and returns the answer to that, or a 101 without more."""
    asked = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        **(headers or {}),
    }
    link = connection()
    try:
        send(link, "GET", path, hosts=hosts, headers=asked)
        response = link.getresponse()
        body = b"" if response.status == 101 else response.read()
        return Answer(response.status, response.getheaders(), body)
    finally:
        link.close()


class EventStream:
    """A stream of server-sent events, line by line as it comes."""

    def __init__(self, sandbox, method, path, body=None):
        self.link = connection()
        headers = {"Accept": "text/event-stream"}
        send(self.link, method, path, hosts=[f"{sandbox}.local"], headers=headers, body=body)
        self.response = self.link.getresponse()
        self.status = self.response.status
        self.content_type = self.response.getheader("content-type", "")

    def lines(self):
        while line := self.response.readline():
            yield line.decode().rstrip("\r\n")

    def events(self):
        """The data of all events until the stream ends."""
        return [json.loads(line[5:]) for line in self.lines() if line.startswith("data:")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.link.close()


def free_port():
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read_through(port, path="/"):
    """What an HTTP server behind a local port answers; None if nobody answers yet."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        link.request("GET", path)
        return link.getresponse().read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        link.close()
