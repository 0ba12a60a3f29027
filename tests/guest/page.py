"""A web application on port 3000, of this machine only: a page whose script opens a WebSocket, sends
what it was told to, and reports what came back. Reports are in /tmp/seen."""

import base64
import hashlib
import socket
import threading

PAGE = b"""<!doctype html><title>page</title><p id=said>waiting</p><script>
const socket = new WebSocket(location.href.replace(/^http/, 'ws').split('?')[0] + 'ws');
socket.onopen = () => socket.send('a word');
socket.onmessage = async message => {
  document.getElementById('said').textContent = message.data;
  const seen = [message.data, location.search || 'no query', document.cookie || 'no cookie'].join(' | ');
  await fetch('/seen', {method: 'POST', body: seen});
};
</script>"""
MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def read_head(stream):
    head = b""
    while b"\r\n\r\n" not in head:
        more = stream.recv(4096)
        if not more:
            return None, b""
        head += more
    head, rest = head.split(b"\r\n\r\n", 1)
    return head, rest


def header(head, name):
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return b""


def exactly(stream, count):
    data = b""
    while len(data) < count:
        more = stream.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def websocket(stream, head):
    key = base64.b64encode(hashlib.sha1(header(head, b"sec-websocket-key") + MAGIC).digest())
    stream.sendall(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
                   b"sec-websocket-accept: " + key + b"\r\n\r\n")
    count = 0
    while True:
        first, second = exactly(stream, 2)
        mask = exactly(stream, 4)
        data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(exactly(stream, second & 127)))
        if first & 15 == 8:
            return
        count += 1
        answer = b"echo %d: " % count + data
        stream.sendall(bytes([0x81, len(answer)]) + answer)


def serve(stream):
    try:
        head, rest = read_head(stream)
        if head is None:
            return
        if header(head, b"upgrade").lower() == b"websocket":
            return websocket(stream, head)
        if head.startswith(b"POST /seen"):
            body = rest + exactly(stream, int(header(head, b"content-length")) - len(rest))
            with open("/tmp/seen", "ab") as seen:
                seen.write(body + b"\n")
        with open("/tmp/heads", "ab") as heads:
            heads.write(head + b"\n\n")
        stream.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n"
                       b"content-length: %d\r\n\r\n" % len(PAGE) + PAGE)
    except (EOFError, OSError):
        pass
    finally:
        stream.close()


listener = socket.create_server(("127.0.0.1", 3000))
while True:
    stream, _ = listener.accept()
    threading.Thread(target=serve, args=(stream,), daemon=True).start()
