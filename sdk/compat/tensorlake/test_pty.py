"""Terminals over WebSocket."""

import pytest
from tensorlake.sandbox import (
    RemoteAPIError,
    Sandbox,
    SandboxConnectionError,
    SandboxError,
    SandboxStatus,
)

from helpers import fresh_name, inside, upgrade, wait_for


class Screen:
    """What a terminal showed so far."""

    def __init__(self):
        self.bytes = b""

    def add(self, data):
        self.bytes += data

    def shows(self, text):
        wait_for(f"the terminal to show {text!r}", lambda: text in self.bytes)


def refusal(box, session, token):
    path = f"/api/v1/pty/{session}/ws?token={token}"
    return upgrade(path, hosts=[f"{box.sandbox_id}.local"])


def test_a_terminal_has_a_shell_a_size_and_an_exit_code(box):
    screen, codes = Screen(), []
    pty = box.create_pty(
        "bash",
        ["--norc"],
        env={"GREETING": "good day"},
        working_dir="/usr",
        rows=30,
        cols=100,
        on_data=screen.add,
        on_exit=codes.append,
    )
    assert pty.connected
    pty.send_input("stty size; pwd; echo $GREETING\n")
    screen.shows(b"30 100")
    screen.shows(b"/usr")
    screen.shows(b"good day")
    pty.resize(cols=120, rows=40)
    pty.send_input("stty size\n")
    screen.shows(b"40 120")
    pty.send_input(b"exit 7\n")
    assert pty.wait(timeout=30) == 7
    assert codes == [7]
    # Who comes late is told as well.
    pty.on_exit(codes.append)
    assert codes == [7, 7]


def test_keys_of_a_terminal_are_signals(box):
    screen = Screen()
    pty = box.create_pty("sh", on_data=screen.add)
    pty.send_input("sleep 1000; echo interrupted\n")
    screen.shows(b"sleep 1000")
    pty.send_input(b"\x03")
    pty.send_input("echo still here; exit\n")
    screen.shows(b"still here")
    pty.wait(timeout=30)


def test_a_terminal_can_be_left_and_found_again(box):
    session = box.create_pty_session("sh").value
    first, second = Screen(), Screen()
    pty = box.connect_pty(session["session_id"], session["token"])
    pty.on_data(first.add)
    pty.send_input("marker=kept; echo $marker\n")
    first.shows(b"kept")
    pty.disconnect()
    assert not pty.connected
    again = box.connect_pty(session["session_id"], session["token"], on_data=second.add)
    # What was shown before is shown again.
    second.shows(b"kept")
    again.send_input('echo "still $marker"; exit 3\n')
    second.shows(b"still kept")
    assert again.wait(timeout=30) == 3


def test_a_handle_that_was_disconnected_connects_again(box):
    screen = Screen()
    pty = box.create_pty("sh")
    pty.on_data(screen.add)
    pty.disconnect()
    assert pty.connect() is pty
    pty.send_input("echo back; exit\n")
    screen.shows(b"back")
    assert pty.wait(timeout=30) == 0


def test_two_clients_see_the_same_terminal(box):
    one, two = Screen(), Screen()
    pty = box.create_pty("sh", on_data=one.add)
    other = box.connect_pty(pty.session_id, pty.token, on_data=two.add)
    pty.send_input("echo to both; exit\n")
    one.shows(b"to both")
    two.shows(b"to both")
    assert [pty.wait(timeout=30), other.wait(timeout=30)] == [0, 0]


def test_a_terminal_is_killed(box):
    pty = box.create_pty("sleep", ["1000"])
    pty.kill()
    # The library below can't tell why a connection ended; the asynchronous one can, and is asked there.
    with pytest.raises(SandboxError):
        pty.wait(timeout=30)
    wait_for("it to be forgotten or dead", lambda: not is_alive(box, pty.session_id))


def is_alive(box, session):
    answer = inside(box.sandbox_id, "GET", f"/api/v1/pty/{session}")
    return answer.status == 200 and answer.json()["is_alive"]


def test_killing_a_terminal_that_nobody_knows_is_an_error(box):
    pty = box.create_pty("sleep", ["1000"])
    pty._http_url = pty._http_url.replace(pty.session_id, "no-such-session")
    with pytest.raises(RemoteAPIError) as refused:
        pty.kill()
    assert refused.value.status_code == 404


def test_the_address_of_a_terminal_does_not_tell_its_token(box):
    session = box.create_pty_session("sh").value
    url = box.pty_ws_url(session["session_id"], session["token"])
    assert url.startswith("ws://localhost:")
    assert url.endswith(f"/api/v1/pty/{session['session_id']}/ws")
    assert session["token"] not in url


def test_terminals_are_listed_looked_at_resized_and_removed(box):
    session = box.create_pty_session("sh", ["-i"], rows=20, cols=60).value["session_id"]
    path = f"/api/v1/pty/{session}"
    listed = inside(box.sandbox_id, "GET", "/api/v1/pty").json()["sessions"]
    mine = next(one for one in listed if one["session_id"] == session)
    assert (mine["command"], mine["args"], mine["is_alive"]) == ("sh", ["-i"], True)
    assert (mine["rows"], mine["cols"], mine["ended_at"], mine["exit_code"]) == (20, 60, None, None)
    assert isinstance(mine["pid"], int)
    resize = {"rows": 33, "cols": 77}
    assert inside(box.sandbox_id, "POST", f"{path}/resize", body=resize).status == 204
    look = inside(box.sandbox_id, "GET", path).json()
    assert (look["rows"], look["cols"]) == (33, 77)
    assert inside(box.sandbox_id, "DELETE", path).status == 204


def test_a_wrong_token_is_refused(box):
    session = box.create_pty_session("sh").value
    answer = refusal(box, session["session_id"], "wrong")
    assert (answer.status, answer.json()["code"]) == (403, "INVALID_TOKEN")
    with pytest.raises(SandboxConnectionError):
        box.connect_pty(session["session_id"], "wrong")


def test_a_token_opens_its_own_terminal_only(box):
    one, two = box.create_pty_session("sh").value, box.create_pty_session("sh").value
    answer = refusal(box, one["session_id"], two["token"])
    assert (answer.status, answer.json()["code"]) == (403, "INVALID_TOKEN")
    assert refusal(box, one["session_id"], one["token"]).status == 101


def test_a_token_of_a_terminal_that_was_removed_opens_nothing(box):
    session = box.create_pty_session("sh").value
    inside(box.sandbox_id, "DELETE", f"/api/v1/pty/{session['session_id']}")
    wait_for("it to be dead", lambda: not is_alive(box, session["session_id"]))
    answer = refusal(box, session["session_id"], session["token"])
    # It is kept for a while, so that who comes late still hears how it ended.
    assert answer.status in (101, 403, 404, 410)
    if answer.status == 101:
        with pytest.raises(SandboxError):
            box.connect_pty(session["session_id"], session["token"]).wait(timeout=30)


def test_a_terminal_of_impossible_size_is_refused(box):
    for rows, cols in ((0, 80), (24, 0), (501, 80), (24, 1001)):
        with pytest.raises(RemoteAPIError) as refused:
            box.create_pty_session("sh", rows=rows, cols=cols)
        assert refused.value.status_code == 400


def test_an_open_terminal_keeps_its_sandbox_awake():
    busy = Sandbox.create(name=fresh_name(), timeout_secs=1)
    idle = Sandbox.create(name=fresh_name(), timeout_secs=1)
    pty = busy.create_pty("sh")
    wait_for("the idle one to sleep", lambda: idle.status == SandboxStatus.SUSPENDED)
    assert busy.status == SandboxStatus.RUNNING
    pty.disconnect()
    wait_for("the other one to sleep", lambda: busy.status == SandboxStatus.SUSPENDED)
