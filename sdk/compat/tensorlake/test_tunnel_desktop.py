"""TCP tunnels into a sandbox, and a desktop through one."""

import json
import pathlib
import socket
import threading

import pytest
from tensorlake.sandbox import Sandbox, SandboxError, SandboxStatus, TcpTunnel

import png
from helpers import free_port, fresh_name, inside, read_through, upgrade, wait_for

HERE = pathlib.Path(__file__).resolve().parent
PASSWORD = "tensorlake"
ECHO = """
import socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("127.0.0.1", 7007), Echo).serve_forever()
"""


def listens(box, port):
    probe = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
    return box.run("bash", ["-c", probe]).exit_code == 0


@pytest.fixture(scope="module")
def echo(box):
    """A server in the shared sandbox that answers with what it gets."""
    started = box.start_process("python3", ["-c", ECHO])
    wait_for("the echo server", lambda: listens(box, 7007))
    yield 7007
    box.kill_process(started.pid)


def exchange(port, data):
    """Sends data and its end, and returns what comes back until the other end."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
        writer = threading.Thread(target=lambda: link.sendall(data))
        writer.start()
        back = bytearray()
        while len(back) < len(data) and (part := link.recv(65536)):
            back += part
        writer.join()
        return bytes(back)


def test_a_tunnel_carries_bytes_both_ways(box, echo):
    with box.create_tunnel(echo, local_port=0) as tunnel:
        assert (tunnel.remote_port, tunnel.closed) == (echo, False)
        assert tunnel.address().port == tunnel.local_port
        assert exchange(tunnel.local_port, b"hello") == b"hello"
        large = bytes(range(256)) * 4096
        assert exchange(tunnel.local_port, large) == large
    assert tunnel.closed


def test_many_connections_share_a_tunnel(box, echo):
    tunnel = box.create_tunnel(echo, local_port=free_port())
    answers = {}

    def ask(n):
        answers[n] = exchange(tunnel.local_port, f"connection {n}".encode() * 1000)

    askers = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert answers == {n: f"connection {n}".encode() * 1000 for n in range(8)}
    tunnel.close()


def test_a_server_that_ends_a_connection_ends_it_here_too(box):
    serve = ["-m", "http.server", "7008", "--bind", "127.0.0.1"]
    box.start_process("python3", serve, working_dir="/etc")
    wait_for("the web server", lambda: listens(box, 7008))
    with box.create_tunnel(7008, local_port=0) as tunnel:
        assert b"root:" in read_through(tunnel.local_port, "/passwd")


def test_a_tunnel_is_made_from_an_address_too(box, echo):
    headers = {"Host": f"{box.sandbox_id}.local"}
    url = box._base_url
    with TcpTunnel.listen(base_url=url, ws_headers=headers, remote_port=echo, local_port=0) as one:
        assert exchange(one.local_port, b"x") == b"x"


def test_a_tunnel_to_a_closed_port_is_refused_before_it_opens(box):
    answer = upgrade("/api/v1/tunnels/tcp?port=7999", hosts=[f"{box.sandbox_id}.local"])
    assert answer.status == 502
    assert answer.json()["error"]
    with box.create_tunnel(7999, local_port=0) as tunnel:
        # The package tells its own client by ending the connection.
        with socket.create_connection(("127.0.0.1", tunnel.local_port), timeout=30) as link:
            try:
                assert link.recv(1) == b""
            except ConnectionResetError:
                pass


def test_a_tunnel_needs_a_port(box):
    for query in ("", "?port=0", "?port=65536", "?port=ssh"):
        answer = upgrade(f"/api/v1/tunnels/tcp{query}", hosts=[f"{box.sandbox_id}.local"])
        assert answer.status == 400, query


def test_a_tunnel_wakes_a_suspended_sandbox_and_its_server_goes_on():
    box = Sandbox.create(name=fresh_name())
    box.start_process("python3", ["-c", ECHO])
    wait_for("the echo server", lambda: listens(box, 7007))
    box.suspend()
    with box.create_tunnel(7007, local_port=0) as tunnel:
        assert exchange(tunnel.local_port, b"awake") == b"awake"
    assert box.status == SandboxStatus.RUNNING


@pytest.fixture(scope="module")
def desktop_server(box):
    """A desktop in the shared sandbox; the fixture is the file of what was done to it."""
    box.upload_file(HERE / "rfb_server.py", "/tmp/rfb_server.py")
    events = "/tmp/rfb-events"
    started = box.start_process("python3", ["/tmp/rfb_server.py", "5901", events])
    yield events
    box.kill_process(started.pid)


def events_of(box, path):
    return [json.loads(line) for line in box.read_file(path).decode().splitlines()]


def test_a_desktop_is_seen(box, desktop_server):
    with box.connect_desktop(password=PASSWORD) as desktop:
        assert (desktop.width, desktop.height) == (64, 48)
        width, height, rows = png.read(desktop.screenshot())
    assert (width, height) == (64, 48)
    assert (rows[0][0], rows[47][31]) == ((255, 0, 0), (255, 0, 0))
    assert (rows[0][32], rows[47][63]) == ((0, 0, 255), (0, 0, 255))
    assert rows[2][3] == (0, 255, 0)


def test_a_desktop_hears_mouse_and_keys(box, desktop_server):
    desktop = box.connect_desktop(port=5901, password=PASSWORD, shared=True, connect_timeout=20)
    done = act_on(desktop)
    desktop.close()
    wait_for("the last event", lambda: events_of(box, desktop_server)[-1] == done)
    events = events_of(box, desktop_server)
    last = max(n for n, event in enumerate(events) if event["kind"] == "begin")
    pointers = [event for event in events[last:] if event["kind"] == "pointer"]
    pressed = {(one["buttons"], one["x"], one["y"]) for one in pointers if one["buttons"]}
    expected = {(1, 5, 6), (4, 7, 8), (2, 9, 10), (1, 11, 12), (1, 13, 14), (4, 15, 16)}
    assert expected <= pressed
    # Up, down, and in one call with a sign.
    assert {(8, 17, 18), (16, 19, 20), (8, 21, 22)} <= pressed
    keys = [(event["key"], event["down"]) for event in events[last:] if event["kind"] == "key"]
    down = [key for key, is_down in keys if is_down]
    assert down[:2] == [ord("H"), ord("i")] or down[:3] == [0xFFE1, ord("H"), ord("i")]
    # enter; control and c; shift.
    assert {0xFF0D, 0xFFE3, ord("c"), 0xFFE1} <= set(down)
    assert {key for key, _ in keys} == {key for key, is_down in keys if not is_down}


def act_on(desktop):
    """Uses everything that a desktop offers, and returns the last event of it."""
    desktop.move_mouse(1, 1)
    desktop.click(5, 6)
    desktop.click(7, 8, button="right")
    desktop.middle_click(9, 10)
    desktop.left_click(11, 12)
    desktop.double_click(13, 14, delay_ms=1)
    desktop.right_click(15, 16)
    desktop.scroll_up(1, 17, 18)
    desktop.scroll_down(1, 19, 20)
    desktop.scroll(1, 21, 22)
    desktop.mouse_press("left", 23, 24)
    desktop.mouse_release("left", 23, 24)
    desktop.type_text("Hi")
    desktop.press("enter")
    desktop.press(["ctrl", "c"])
    desktop.key_down("shift")
    desktop.key_up("shift")
    return {"kind": "key", "down": False, "key": 0xFFE1}


def test_a_wrong_password_opens_no_desktop(box, desktop_server):
    with pytest.raises(SandboxError):
        box.connect_desktop(password="wrong")


def test_the_probe_for_a_desktop_may_name_its_limit_in_its_own_way(box):
    body = {"command": "sleep", "args": ["1000"], "timeout_secs": 1}
    answer = inside(box.sandbox_id, "POST", "/api/v1/processes/run", body=body)
    assert b"timed_out" in answer.body
