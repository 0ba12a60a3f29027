"""Logs that are kept of what processes say."""

import time

import pytest
from tensorlake.sandbox import Sandbox, SandboxLogLevel, SandboxNotFoundError

from helpers import fresh_name, lifecycle, request, wait_for


@pytest.fixture
def talking():
    """A sandbox in which two processes said something, once all of it is in the logs."""
    box = Sandbox.create(name=fresh_name("talk"))
    box.start_process("sh", ["-c", "for n in 1 2 3 4 5; do echo line $n; done"], name="counter")
    box.start_process("sh", ["-c", "echo Needle in the haystack; echo trouble >&2"])
    wait_for("all seven lines", lambda: len(box.get_logs().logs) >= 7)
    return box


def bodies(response):
    return [entry.body for entry in response.logs]


def test_what_processes_say_is_kept(talking, client):
    response = talking.get_logs()
    lines = bodies(response)
    assert [line for line in lines if line.startswith("line")] == [f"line {n}" for n in range(1, 6)]
    assert {"Needle in the haystack", "trouble"} <= set(lines)
    entry = response.logs[0]
    assert (entry.sandbox_id, entry.namespace) == (talking.sandbox_id, "default")
    assert entry.level in range(1, 7)
    assert len({one.uuid for one in response.logs}) == len(response.logs)
    seconds = next(
        entry.timestamp / unit for unit in (1, 1e3, 1e6, 1e9) if entry.timestamp / unit < 1e10
    )
    assert abs(seconds - time.time()) < 60
    assert bodies(client.get_logs(talking.sandbox_id)) == lines


def test_logs_are_searched_and_cut(talking):
    assert bodies(talking.get_logs(body="nEEDLE")) == ["Needle in the haystack"]
    assert bodies(talking.get_logs(body="nowhere")) == []
    everything = bodies(talking.get_logs())
    assert sorted(bodies(talking.get_logs(head=2))) == sorted(everything[:2])
    assert sorted(bodies(talking.get_logs(tail=2))) == sorted(everything[-2:])


def test_logs_are_chosen_by_level(talking):
    errors = bodies(talking.get_logs(levels=[SandboxLogLevel.ERROR, SandboxLogLevel.WARN]))
    assert errors == ["trouble"]
    quiet = bodies(talking.get_logs(levels=["info"]))
    assert "trouble" not in quiet
    assert "Needle in the haystack" in quiet
    assert bodies(talking.get_logs(levels=["fatal"])) == []


def test_logs_are_chosen_by_process(talking, client):
    processes = talking.list_log_processes().processes
    counter = next(one for one in processes if one.process_managed_name == "counter")
    assert counter.log_count == 5
    assert "sh" in counter.process_command
    assert counter.first_seen <= counter.last_seen
    chosen = talking.get_logs(process_ids=[counter.process_id])
    assert bodies(chosen) == [f"line {n}" for n in range(1, 6)]
    same = client.list_log_processes(talking.sandbox_id).processes
    assert {one.process_id for one in same} == {one.process_id for one in processes}


def test_logs_come_in_pages(talking):
    everything, token, pages = [], None, 0
    while True:
        page = talking.get_logs(head=3, next_token=token)
        everything += bodies(page)
        token, pages = page.next_token, pages + 1
        if not token or pages > 10:
            break
    assert sorted(everything) == sorted(bodies(talking.get_logs()))
    assert pages >= 3


def test_logs_of_a_suspended_sandbox_are_read_without_waking_it(talking):
    talking.suspend()
    assert len(talking.get_logs().logs) >= 7
    assert talking.status == "suspended"


def test_logs_of_nobody_are_not_found(client):
    for ask in (client.get_logs, client.list_log_processes):
        with pytest.raises(SandboxNotFoundError):
            ask("no-such-sandbox")


def test_logs_are_always_asked_for_with_the_namespace(talking, monkeypatch, world):
    # With flat paths for everything else, these two stay as they are.
    monkeypatch.setenv("TENSORLAKE_SANDBOX_API_URL", world.daemon.url)
    flat = Sandbox.connect(talking.sandbox_id)
    assert len(flat.get_logs().logs) >= 7
    assert lifecycle("GET", f"/sandboxes/{talking.sandbox_id}/logs?tail=1").status == 200
    other = request("GET", f"/v1/namespaces/other/sandboxes/{talking.sandbox_id}/logs")
    assert other.status == 403
