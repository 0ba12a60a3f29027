"""What the package depends on without saying so: one test for each entry of the list of traps in the
protocol's description (section 13), to the byte where the package would hide it."""

import os
import time

import pytest
from tensorlake.sandbox import RemoteAPIError, Sandbox, SandboxStatus, _defaults

import remote
from helpers import (
    BASE_IMAGE,
    EventStream,
    fresh_name,
    inside,
    lifecycle,
    own,
    request,
    server,
    upgrade,
    wait_for,
)

RUN = "/api/v1/processes/run"


def create(**body):
    answer = lifecycle("POST", "/sandboxes", body=body)
    assert answer.status in (200, 201), answer
    return answer.json()


def info(sandbox):
    answer = lifecycle("GET", f"/sandboxes/{sandbox}")
    assert answer.status == 200, answer
    return answer.json()


def here():
    return "http://%s:%d" % server()


def test_01_the_address_of_a_sandbox_is_told_while_it_runs_and_while_it_sleeps():
    made = create(name=fresh_name())
    assert made["sandbox_url"] == here()
    assert info(made["sandbox_id"])["sandbox_url"] == here()
    lifecycle("POST", f"/sandboxes/{made['sandbox_id']}/suspend?wait_ms=30000")
    asleep = info(made["sandbox_id"])
    assert (asleep["status"], asleep["sandbox_url"]) == ("suspended", here())


def test_01_the_address_is_the_one_that_the_client_used():
    made = create()
    asked = lifecycle("GET", f"/sandboxes/{made['sandbox_id']}", hosts=[f"127.0.0.1:{server()[1]}"])
    assert asked.json()["sandbox_url"] == f"http://127.0.0.1:{server()[1]}"


def test_02_states_are_lowercase():
    made = create(name=fresh_name())
    assert (made["status"], info(made["sandbox_id"])["status"]) == ("running", "running")
    queued = lifecycle("POST", "/sandboxes", body={"wait": False})
    assert queued.status == 202
    assert queued.json().get("state", queued.json().get("status")) in ("pending", "running")


def test_03_resources_have_a_disk_and_numbers_are_whole():
    resources = info(create(resources={"cpus": 1.5, "memory_mb": 1536})["sandbox_id"])["resources"]
    assert resources["cpus"] == 1.5
    for field in ("memory_mb", "disk_mb"):
        assert type(resources[field]) is int
    assert resources["disk_mb"] > 0


def test_04_05_06_a_run_is_a_stream_of_events_in_the_agreed_form(box):
    body = {"command": "sh", "args": ["-c", "echo out; echo err >&2; exit 3"]}
    with EventStream(box.sandbox_id, "POST", RUN, body) as stream:
        assert (stream.status, "text/event-stream" in stream.content_type) == (200, True)
        events = stream.events()
    started, lines, end = events[0], events[1:-1], events[-1]
    assert isinstance(started["pid"], int)
    assert abs(started["started_at"] / 1000 - time.time()) < 60
    assert {(line["line"], line["stream"]) for line in lines} == {("out", "stdout"), ("err", "stderr")}
    assert all(isinstance(line["timestamp"], int) for line in lines)
    assert (end["exit_code"], end["reason"]) == (3, "exited")
    assert not {"pid", "started_at"} <= set(end)


def test_06_quiet_streams_are_kept_alive(box):
    started = box.start_process("sleep", ["1000"])
    path = f"/api/v1/processes/{started.pid}/output/follow"
    run = {"command": "sleep", "args": ["1000"]}
    begun = time.monotonic()
    one = EventStream(box.sandbox_id, "POST", RUN, run)
    two = EventStream(box.sandbox_id, "GET", path)
    for stream in (one, two):
        with stream:
            assert next(line for line in stream.lines() if line.startswith(":")) is not None
    assert time.monotonic() - begun <= 15
    box.kill_process(started.pid)


def test_06_a_followed_stream_replays_and_ends(box):
    started = box.start_process("sh", ["-c", "echo first; echo second"])
    path = f"/api/v1/processes/{started.pid}/stdout/follow"
    with EventStream(box.sandbox_id, "GET", path) as stream:
        assert "text/event-stream" in stream.content_type
        lines = [event["line"] for event in stream.events() if "line" in event]
    assert lines == ["first", "second"]


def test_07_questions_are_answered_within_three_seconds_also_those_that_wake():
    name = fresh_name()
    create(name=name)
    questions = ("/api/v1/health", "/api/v1/info", "/api/v1/processes", "/api/v1/files/list?path=%2F")
    for question in questions:
        lifecycle("POST", f"/sandboxes/{name}/suspend?wait_ms=30000")
        assert info(name)["status"] == "suspended"
        begun = time.monotonic()
        assert inside(name, "GET", question).status == 200
        assert time.monotonic() - begun < 3
    for path in (
        "/sandboxes",
        f"/sandboxes/{name}",
        "/archived-sandboxes",
        "/snapshots",
        "/sandbox-pools",
    ):
        begun = time.monotonic()
        assert lifecycle("GET", path).status == 200
        assert time.monotonic() - begun < 3


def test_08_a_wait_is_honoured_and_its_outcome_told_by_the_status():
    name = fresh_name()
    create(name=name)
    for verb, target in (("suspend", "suspended"), ("resume", "running")):
        path = f"/sandboxes/{name}/{verb}"
        assert lifecycle("POST", f"{path}?wait_ms=30000").status == 200
        assert info(name)["status"] == target
        # Already there, with and without a wait.
        assert lifecycle("POST", f"{path}?wait_ms=30000").status == 200
        assert lifecycle("POST", path).status in (200, 202)


def test_08_without_a_wait_the_answer_comes_at_once():
    name = fresh_name()
    create(name=name)
    for verb, target in (("suspend", "suspended"), ("resume", "running")):
        assert lifecycle("POST", f"/sandboxes/{name}/{verb}").status in (200, 202)
        wait_for(target, lambda target=target: info(name)["status"] == target)


def test_09_a_create_that_takes_too_long_is_answered_in_time_and_goes_on():
    headers = {
        "X-Tensorlake-Request-Timeout-Ms": "8",
        "X-Tensorlake-Request-Timeout-Grace-Ms": "2",
    }
    answer = lifecycle("POST", "/sandboxes", body={"name": fresh_name()}, headers=headers)
    assert answer.status == 504, answer
    assert answer.json()["status"] == "timeout"
    sandbox = answer.json()["sandbox_id"]
    wait_for("it to run", lambda: info(sandbox)["status"] == "running")


def test_10_what_failed_after_it_began_is_not_asked_for_again(box):
    attempts = [
        (RUN, {"command": "no-such-command"}),
        ("/api/v1/processes", {"command": "no-such-command"}),
        (RUN, {"command": "true", "working_dir": "/no/such/directory"}),
        ("/api/v1/pty", {"command": "no-such-command", "rows": 24, "cols": 80}),
    ]
    for path, body in attempts:
        answer = inside(box.sandbox_id, "POST", path, body=body)
        # A terminal may begin and end at once instead.
        assert answer.status not in (502, 503, 504), (path, answer)
        if not path.endswith("pty"):
            assert answer.status >= 400, (path, answer)


def test_11_a_sandbox_is_addressed_by_its_id_and_by_its_name():
    name = fresh_name()
    made = create(name=name)
    for label in (name, made["sandbox_id"]):
        assert inside(label, "GET", "/api/v1/health").json() == {"healthy": True}
    by_header = {"X-Tensorlake-Sandbox-Id": made["sandbox_id"]}
    answer = request("GET", "/api/v1/health", headers=by_header, hosts=["127.0.0.2:1234"])
    assert answer.json() == {"healthy": True}
    # Who sends the header says the true host: this one may be a page's.
    assert request("GET", "/api/v1/health", headers=by_header, hosts=["nobody.local"]).status == 401


def test_11_two_host_headers_are_refused(box):
    good, other = f"{box.sandbox_id}.local", "other.local"
    for hosts in ([good, other], [other, good], [good, good]):
        assert request("GET", "/api/v1/health", hosts=hosts).status == 400


def test_11_an_origin_is_tolerated_where_the_package_sends_one(box):
    session = box.create_pty_session("sh").value
    path = f"/api/v1/pty/{session['session_id']}/ws?token={session['token']}"
    headers = {"Origin": here()}
    assert upgrade(path, hosts=[f"{box.sandbox_id}.local"], headers=headers).status == 101


def test_11_a_terminal_token_may_come_in_the_header_alone(box):
    session = box.create_pty_session("sh").value
    path = f"/api/v1/pty/{session['session_id']}/ws"
    headers = {"X-PTY-Token": session["token"]}
    assert upgrade(path, hosts=[f"{box.sandbox_id}.local"], headers=headers).status == 101


def test_11_a_client_from_elsewhere_is_served_with_flat_paths_and_the_header(world, monkeypatch):
    with remote.relay(world.daemon.port) as port:
        url = f"http://{remote.ADDRESS}:{port}"
        monkeypatch.setenv("TENSORLAKE_SANDBOX_API_URL", url)
        box = Sandbox.create(name=fresh_name(), api_url=url)
        assert box.info().sandbox_url == url
        assert box.run("echo", ["from afar"]).stdout == "from afar"
        seen = bytearray()
        pty = box.create_pty("sh", on_data=seen.extend)
        pty.send_input("echo near; exit 4\n")
        assert pty.wait(timeout=30) == 4
        box.terminate()


def test_12_a_limit_of_time_has_two_names(box):
    for limit in ({"timeout": 0.3}, {"timeout_secs": 1}):
        body = {"command": "sleep", "args": ["1000"], **limit}
        with EventStream(box.sandbox_id, "POST", RUN, body) as stream:
            end = stream.events()[-1]
        assert (end["reason"], end["signal"]) == ("timed_out", 9)


def test_13_a_delete_with_a_body_is_read(box):
    path = f"/sandboxes/{box.sandbox_id}/file_systems"
    refused = lifecycle("DELETE", path, body={"mount_path": "/mnt/skills"})
    assert refused.status == 400
    assert refused.json()["error"]


def test_14_a_plus_in_a_query_is_a_blank(box):
    put = inside(box.sandbox_id, "PUT", "/api/v1/files?path=%2Ftmp%2Fa+b%2Bc.txt", body=b"blank")
    assert put.status == 204
    assert box.run("cat", ["/tmp/a b+c.txt"]).stdout == "blank"


def test_15_everything_is_there_with_and_without_the_namespace():
    made = create(name=fresh_name())
    for path in (
        "/sandboxes",
        f"/sandboxes/{made['sandbox_id']}",
        f"/sandboxes/{made['name']}",
        f"/sandboxes/{made['sandbox_id']}/snapshots",
        "/archived-sandboxes",
        "/snapshots",
        "/sandbox-pools",
    ):
        flat, prefixed = request("GET", path), lifecycle("GET", path)
        assert (flat.status, prefixed.status) == (200, 200), path
        assert set(flat.json()) == set(prefixed.json())
    flat = request("POST", "/sandboxes", body={"name": fresh_name()})
    assert flat.status in (200, 201)
    assert info(flat.json()["sandbox_id"])["status"] == "running"


def test_15_another_namespace_is_forbidden():
    for method, path in (("GET", "/sandboxes"), ("POST", "/sandboxes"), ("GET", "/secrets")):
        answer = request(method, f"/v1/namespaces/other{path}", body={} if method == "POST" else None)
        assert answer.status == 403, (path, answer)
        assert answer.json()["error"]
    with pytest.raises(RemoteAPIError) as refused:
        Sandbox.create(namespace="other")
    assert refused.value.status_code == 403


def test_16_a_claim_without_configuration_needs_no_word_about_it():
    body = {"image": BASE_IMAGE, "warm_containers": 0}
    pool = lifecycle("POST", "/sandbox-pools", body=body).json()["pool_id"]
    claim = lifecycle("POST", f"/sandbox-pools/{pool}/sandboxes")
    assert claim.status in (200, 201)
    assert claim.json()["status"] == "running"


def test_17_requests_without_a_body_are_whole():
    name = fresh_name()
    made = create(name=name)
    snapshot = lifecycle("POST", f"/sandboxes/{name}/snapshot")
    assert snapshot.status in (200, 201, 202)
    assert snapshot.json()["snapshot_id"]
    copied = lifecycle("POST", f"/sandboxes/{name}/copy?times=1")
    assert copied.json()["source_sandbox_id"] == made["sandbox_id"]
    nap = {"command": "sleep", "args": ["9"], "name": "nap"}
    started = inside(name, "POST", "/api/v1/processes", body=nap)
    assert started.status == 201
    assert inside(name, "POST", "/api/v1/processes/nap/restart").status == 200
    assert lifecycle("POST", f"/sandboxes/{name}/suspend").status in (200, 202)


def test_18_the_image_has_the_user_and_the_shell_that_the_package_counts_on(box):
    told = box.run("sh", ["-c", "id -un tl-user; echo ~tl-user; command -v bash"]).stdout
    assert told.splitlines()[:2] == ["tl-user", "/home/tl-user"]
    assert told.splitlines()[2].endswith("/bash")


def test_19_a_key_is_introspected():
    answer = request("POST", "/platform/v1/keys/introspect", headers={"Authorization": "Bearer x"})
    assert answer.status == 200
    assert {"id", "organizationId", "projectId"} <= set(answer.json())


def test_20_the_package_was_told_the_address_before_it_was_imported():
    assert _defaults.API_URL == os.environ["TENSORLAKE_API_URL"] == here()


def test_23_a_name_that_nobody_has_is_a_clean_404():
    answer = lifecycle("GET", "/sandboxes/nobody-has-this-name")
    assert answer.status == 404
    assert answer.json()["error"]
    assert Sandbox.get_or_create(fresh_name()).bind_outcome == "created"


def test_an_api_key_of_torpor_is_a_key_of_the_package():
    made = own("POST", "/keys", body={"label": "for the package"}).json()
    secret = next(value for value in made.values() if len(str(value)) > 20 and value.startswith("tpk_"))
    headers = {"Authorization": f"Bearer {secret}"}
    try:
        box = Sandbox.create(api_key=secret)
        assert box.run("true").exit_code == 0
        assert box.status == SandboxStatus.RUNNING
        for attempt in (Sandbox.create, Sandbox.list):
            with pytest.raises(RemoteAPIError) as refused:
                attempt(api_key="wrong")
            assert refused.value.status_code == 401
        assert inside(box.sandbox_id, "GET", "/api/v1/health").status == 401
        # With a key it does not matter under which name the host is known.
        by_header = {**headers, "X-Tensorlake-Sandbox-Id": box.sandbox_id}
        answer = request("GET", "/api/v1/health", headers=by_header, hosts=["torpor.example:1234"])
        assert answer.json() == {"healthy": True}
    finally:
        own("DELETE", f"/keys/{made['id']}", headers=headers)
    assert own("GET", "/sandboxes").status == 200
