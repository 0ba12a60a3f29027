"""What can be asked wrongly is refused with the documented status and a body that says why, and leaves
nothing behind."""

import json
import threading

import pytest
from tensorlake.sandbox import (
    CheckpointType,
    RemoteAPIError,
    Sandbox,
    SandboxError,
    SandboxNotFoundError,
)

from helpers import fresh_name, inside, lifecycle, own_list, request, upgrade

pytestmark = pytest.mark.usefixtures("nothing_leaked")

NOBODY = "nobody-of-this-name"


def assert_says_why(answer):
    body = answer.json()
    assert isinstance(body["error"], str) and body["error"]
    assert isinstance(body["code"], str) and body["code"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/sandboxes/{NOBODY}"),
        ("PATCH", f"/sandboxes/{NOBODY}"),
        ("DELETE", f"/sandboxes/{NOBODY}"),
        ("POST", f"/sandboxes/{NOBODY}/suspend"),
        ("POST", f"/sandboxes/{NOBODY}/resume"),
        ("POST", f"/sandboxes/{NOBODY}/snapshot"),
        ("GET", f"/sandboxes/{NOBODY}/snapshots"),
        ("POST", f"/sandboxes/{NOBODY}/copy?times=1"),
        ("GET", f"/sandboxes/{NOBODY}/logs"),
        ("GET", f"/sandboxes/{NOBODY}/processes"),
        ("GET", f"/archived-sandboxes/{NOBODY}"),
        ("GET", f"/snapshots/{NOBODY}"),
        ("DELETE", f"/snapshots/{NOBODY}"),
        ("GET", f"/sandbox-pools/{NOBODY}"),
        ("DELETE", f"/sandbox-pools/{NOBODY}"),
        ("POST", f"/sandbox-pools/{NOBODY}/sandboxes"),
        ("GET", f"/secrets/{NOBODY}"),
        ("DELETE", f"/secrets/{NOBODY}"),
    ],
)
def test_what_nobody_knows_is_not_found(method, path):
    answer = lifecycle(method, path, body={"name": "x"} if method == "PATCH" else None)
    assert answer.status == 404, answer
    assert_says_why(answer)


@pytest.mark.parametrize("identifier", ["..", "%2e%2e", "a%2Fb", "A" * 300, "%00", "%C3%A4"])
def test_an_identifier_that_can_not_be_one_is_refused(identifier):
    assert lifecycle("GET", f"/sandboxes/{identifier}").status in (400, 404)


def test_the_package_says_not_found_for_what_nobody_knows(client):
    asks = (client.get, client.delete, client.suspend, client.resume, client.copy, client.snapshot)
    for ask in asks:
        with pytest.raises(SandboxNotFoundError):
            ask(NOBODY)
    with pytest.raises(SandboxNotFoundError):
        Sandbox.connect(NOBODY)


def test_the_daemon_of_a_sandbox_that_nobody_knows_is_not_found():
    answer = inside(NOBODY, "GET", "/api/v1/health")
    assert (answer.status, answer.json()["code"]) == (404, "SANDBOX_NOT_FOUND")
    answer = request("GET", "/api/v1/health", headers={"X-Tensorlake-Sandbox-Id": NOBODY})
    assert (answer.status, answer.json()["code"]) == (404, "SANDBOX_NOT_FOUND")
    for path in ("/api/v1/tunnels/tcp?port=80", "/api/v1/pty/x/ws?token=y"):
        assert upgrade(path, hosts=[f"{NOBODY}.local"]).status == 404


def test_a_request_that_names_no_sandbox_is_refused():
    answer = request("GET", "/api/v1/health")
    assert (answer.status, answer.json()["code"]) == (400, "MISSING_SANDBOX_ID")


@pytest.mark.parametrize(
    "body",
    [
        {"name": 5},
        {"name": "Not A Name"},
        {"name": "a" * 64},
        {"name": "ends-with-hyphen-"},
        {"name": "x" * 21},
        {"image": ["a"]},
        {"resources": "many"},
        {"resources": {"cpus": "two"}},
        {"resources": {"cpus": -1}},
        {"resources": {"cpus": 0}},
        {"resources": {"memory_mb": 1.5}},
        {"resources": {"memory_mb": -1}},
        {"timeout_secs": "soon"},
        {"timeout_secs": -1},
        {"entrypoint": "a string"},
        {"exposed_ports": "80"},
        {"exposed_ports": [0]},
        {"exposed_ports": [65536]},
        {"exposed_ports": [9501]},
        {"network": {"allow_out": "1.1.1.1"}},
        {"network": {"allow_out": ["not an address"]}},
        {"network": {"deny_out": ["1.2.3.4/99"]}},
        {"secret_names": "ONE"},
        {"auto_resume": False},
        {"max_pending_secs": -1},
        {"wait": "no"},
        {"file_systems": [{"file_system_id": "a", "mount_path": "m"}]},
        {"cloud_init_base64": "not base64!"},
    ],
    ids=lambda body: json.dumps(body)[:40],
)
def test_a_create_that_makes_no_sense_is_refused(body):
    answer = lifecycle("POST", "/sandboxes", body=body)
    assert answer.status in (400, 422), answer
    assert_says_why(answer)


@pytest.mark.parametrize("raw", [b"not json", b"[]", b'"text"', b"{", b"\xff\xfe", b"null"])
def test_a_body_that_is_no_json_object_is_refused(raw):
    headers = {"Content-Type": "application/json"}
    answer = lifecycle("POST", "/sandboxes", body=raw, headers=headers)
    assert answer.status in (400, 422), answer
    assert_says_why(answer)


@pytest.mark.parametrize(
    "body",
    [
        {"name": 5},
        {"exposed_ports": "80"},
        {"exposed_ports": [9501]},
        {"network": "none"},
        {"network": {"allow_out": ["https://example.com"]}},
        {"network": {"allow_out": ["no-such-host.invalid"]}},
        {"auto_resume": "no"},
        {"resources": {"cpus": "two"}},
        {"resources": {"cpus": 1000}},
        {"resources": {"memory_mb": 100_000_000}},
        {},
    ],
    ids=lambda body: json.dumps(body)[:40],
)
def test_a_change_that_makes_no_sense_is_refused_and_changes_nothing(box, body):
    before = lifecycle("GET", f"/sandboxes/{box.sandbox_id}").json()
    answer = lifecycle("PATCH", f"/sandboxes/{box.sandbox_id}", body=body)
    assert answer.status in (400, 422), answer
    assert_says_why(answer)
    assert lifecycle("GET", f"/sandboxes/{box.sandbox_id}").json() == before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/v1/processes/run", {}),
        ("/api/v1/processes/run", {"command": 5}),
        ("/api/v1/processes/run", {"command": "true", "args": "not a list"}),
        ("/api/v1/processes/run", {"command": "true", "env": ["A=1"]}),
        ("/api/v1/processes/run", {"command": "true", "timeout": -1}),
        ("/api/v1/processes/run", {"command": "true", "user": 5}),
        ("/api/v1/processes", {"command": "true", "stdin_mode": "sometimes"}),
        ("/api/v1/processes", {"command": "true", "name": "123"}),
        ("/api/v1/processes", {"command": "true", "name": "a/b"}),
        ("/api/v1/processes", {"command": "true", "restart": {"policy": "perhaps"}}),
        ("/api/v1/processes", {"command": "true", "health_check": {"type": "udp", "port": 1}}),
        ("/api/v1/pty", {"command": "sh", "rows": "many", "cols": 80}),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_command_that_makes_no_sense_is_refused(box, path, body):
    answer = inside(box.sandbox_id, "POST", path, body=body)
    assert answer.status in (400, 422), answer
    assert_says_why(answer)


def test_a_signal_that_does_not_exist_is_refused(box):
    started = box.start_process("sleep", ["1000"])
    for signal in (0, -1, 65, 1000):
        with pytest.raises(RemoteAPIError) as refused:
            box.send_signal(started.pid, signal)
        assert refused.value.status_code in (400, 422)
    box.kill_process(started.pid)


def test_a_body_of_many_megabytes_is_refused(box):
    large = {"name": "x" * (32 << 20)}
    for ask in (
        lambda: lifecycle("POST", "/sandboxes", body=large),
        lambda: inside(box.sandbox_id, "POST", "/api/v1/processes", body=large),
    ):
        try:
            assert ask().status in (400, 413, 422)
        except (BrokenPipeError, ConnectionResetError):
            pass  # It hung up while we were still talking, which is a refusal as well.
    assert box.health().healthy


def test_a_copy_of_none_and_of_ten_thousand_is_refused(client):
    made = client.create(name=fresh_name())
    for times in ("0", "10000", "-1", "many", ""):
        answer = lifecycle("POST", f"/sandboxes/{made.sandbox_id}/copy?times={times}")
        assert answer.status == 400, (times, answer)
        assert_says_why(answer)
    with pytest.raises(RemoteAPIError) as refused:
        client.copy(made.sandbox_id, times=10_000)
    assert refused.value.status_code == 400
    with pytest.raises(SandboxError):
        client.copy(made.sandbox_id, times=0)
    client.delete(made.sandbox_id)


def test_a_suspended_sandbox_is_not_copied_or_says_why_not(client):
    box = Sandbox.create(name=fresh_name())
    box.suspend()
    answer = lifecycle("POST", f"/sandboxes/{box.sandbox_id}/copy?times=1")
    assert answer.status in (200, 400, 409), answer
    for copy in answer.json().get("sandboxes", []):
        client.delete(copy["sandbox_id"])
    box.terminate()


def test_a_snapshot_kind_that_does_not_exist_is_refused(box):
    path = f"/sandboxes/{box.sandbox_id}/snapshot"
    for body in ({"snapshot_type": "everything"}, {"snapshot_type": 1}):
        answer = lifecycle("POST", path, body=body)
        assert answer.status in (400, 422)
        assert_says_why(answer)


def test_a_wait_that_is_no_number_is_refused_and_a_long_one_is_cut(client):
    made = client.create(name=fresh_name())
    path = f"/sandboxes/{made.sandbox_id}/suspend"
    assert lifecycle("POST", f"{path}?wait_ms=soon").status == 400
    assert lifecycle("POST", f"{path}?wait_ms=99999999").status == 200
    client.delete(made.sandbox_id)


def test_a_page_that_does_not_exist_is_refused():
    for query in ("limit=0", "limit=many", "cursor=nonsense", "direction=sideways"):
        assert lifecycle("GET", f"/archived-sandboxes?{query}").status == 400, query


def test_a_snapshot_that_is_deleted_while_something_begins_from_it_does_no_harm(client):
    box = Sandbox.create()
    for _ in range(3):
        snapshot = box.checkpoint(checkpoint_type=CheckpointType.MEMORY, poll_interval=0.02)
        answers = []
        body = {"snapshot_id": snapshot.snapshot_id}
        begin = threading.Thread(
            target=lambda body=body, answers=answers: answers.append(
                lifecycle("POST", "/sandboxes", body=body)
            )
        )
        begin.start()
        deleted = lifecycle("DELETE", f"/snapshots/{snapshot.snapshot_id}")
        begin.join()
        made = answers[0]
        assert deleted.status in (200, 204, 409), deleted
        assert made.status in (200, 201, 404, 409, 422), made
        if made.status in (200, 201):
            fork = client.connect(made.json()["sandbox_id"])
            assert fork.run("echo", ["whole"]).stdout == "whole"
            fork.terminate()
        if deleted.status == 409:
            client.delete_snapshot(snapshot.snapshot_id)
        assert own_list("snapshots") == []
    box.terminate()


def test_a_method_that_does_not_exist_is_refused():
    for method, path in (("PUT", "/sandboxes"), ("DELETE", "/sandboxes"), ("PATCH", "/snapshots")):
        assert lifecycle(method, path, body={}).status in (404, 405)


def test_a_path_that_does_not_exist_is_not_found(box):
    assert lifecycle("GET", "/no-such-thing").status == 404
    assert inside(box.sandbox_id, "GET", "/api/v1/no-such-thing").status == 404


def test_a_plain_request_to_a_socket_is_refused(box):
    for path in ("/api/v1/tunnels/tcp?port=80", "/api/v1/pty/x/ws?token=y"):
        assert 400 <= inside(box.sandbox_id, "GET", path).status < 500
