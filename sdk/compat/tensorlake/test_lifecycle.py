"""Create, find, change, suspend, resume and end a sandbox with `Sandbox` and `SandboxClient`."""

import re
import threading
import time

import pytest
from tensorlake.sandbox import (
    CLEAR_NETWORK_POLICY,
    NetworkConfig,
    RemoteAPIError,
    Sandbox,
    SandboxClient,
    SandboxError,
    SandboxNotFoundError,
    SandboxPending,
    SandboxStatus,
)

from helpers import BASE_IMAGE, fresh_name, lifecycle, own_list, wait_for


def is_gone(client, sandbox_id):
    """Whether a sandbox ended: it is not there any more, or says that it is terminated."""
    try:
        return client.get(sandbox_id).status == SandboxStatus.TERMINATED
    except SandboxNotFoundError:
        return True


def test_a_sandbox_is_created_runs_a_command_and_is_gone_after_its_block(client):
    with Sandbox.create(image=BASE_IMAGE, cpus=1.0, memory_mb=1024, timeout_secs=600) as box:
        assert box.status == SandboxStatus.RUNNING
        assert box.run("echo", ["hello"]).stdout == "hello"
        assert re.fullmatch(r"[0-9a-f]{32}", box.trace_id)
        sandbox_id = box.sandbox_id
    wait_for("it to be gone", lambda: is_gone(client, sandbox_id))
    assert sandbox_id not in [one["id"] for one in own_list("sandboxes")]


def test_info_tells_what_was_asked_for():
    name = fresh_name()
    box = Sandbox.create(
        image=BASE_IMAGE,
        name=name,
        cpus=1.0,
        memory_mb=1024,
        timeout_secs=300,
        exposed_ports=[8080, 80],
        allow_unauthenticated_access=True,
        allow_internet_access=False,
    )
    info = box.info()
    assert info.sandbox_id == box.sandbox_id
    # It is a label of a host name, and appears in paths as it is.
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", info.sandbox_id)
    assert (info.name, box.name, info.namespace) == (name, name, "default")
    assert info.status == SandboxStatus.RUNNING
    assert info.image == BASE_IMAGE
    assert (info.resources.cpus, info.resources.memory_mb) == (1.0, 1024)
    assert info.resources.disk_mb > 0
    assert info.timeout_secs == 300
    assert info.exposed_ports == [80, 8080]
    assert info.allow_unauthenticated_access is True
    assert info.network_policy.allow_internet_access is False
    assert info.auto_resume is True
    assert info.file_systems == []
    assert abs(info.created_at.timestamp() - time.time()) < 60
    assert info.sandbox_url.startswith("http://localhost:")


def test_a_sandbox_is_found_by_its_id_and_by_its_name():
    name = fresh_name()
    box = Sandbox.create(name=name)
    by_name, by_id = Sandbox.connect(name), Sandbox.connect(box.sandbox_id)
    assert by_name.sandbox_id == by_id.sandbox_id == box.sandbox_id
    assert by_id.name == name
    by_name.write_file("/tmp/note", b"one sandbox")
    assert by_id.read_file("/tmp/note").value == b"one sandbox"
    # A handle that was not the creator's ends without its sandbox.
    with by_name:
        pass
    by_id.close()
    assert box.status == SandboxStatus.RUNNING


def test_a_name_is_given_once_and_is_free_again_when_its_sandbox_ended(client):
    name = fresh_name()
    first = client.create(name=name)
    with pytest.raises(RemoteAPIError) as refused:
        client.create(name=name)
    assert refused.value.status_code == 409
    client.delete(first.sandbox_id)
    wait_for("it to be gone", lambda: is_gone(client, first.sandbox_id))
    assert client.create(name=name).sandbox_id != first.sandbox_id


def test_the_client_creates_gets_lists_and_deletes(client):
    made = client.create(cpus=1.0, memory_mb=1024)
    assert made.status == SandboxStatus.RUNNING
    assert made.sandbox_url.startswith("http://localhost:")
    assert client.get(made.sandbox_id).status == SandboxStatus.RUNNING
    assert made.sandbox_id in [info.sandbox_id for info in client.list()]
    assert made.sandbox_id in [info.sandbox_id for info in Sandbox.list()]
    assert client.connect(made.sandbox_id).health().healthy
    assert client.delete(made.sandbox_id).value is None
    wait_for("it to be gone", lambda: is_gone(client, made.sandbox_id))


def test_the_client_creates_and_connects_in_one_call(client):
    with client.create_and_connect(name=fresh_name()) as box:
        assert box.run("id", ["-un"]).exit_code == 0
        assert box.daemon_info().uptime_secs >= 0


def test_clients_for_localhost_and_for_another_address_are_the_same_to_the_server(world):
    url = world.daemon.url
    local = SandboxClient.for_localhost(api_url=url)
    elsewhere = SandboxClient.for_cloud(api_key="any", api_url=url)
    made = local.create()
    assert elsewhere.get(made.sandbox_id).sandbox_id == made.sandbox_id
    local.close()
    elsewhere.close()


def test_a_queued_create_answers_at_once_and_is_ready_later():
    pending = Sandbox.create(name=fresh_name(), wait=False, max_pending_secs=60)
    assert pending.state in (SandboxStatus.PENDING, SandboxStatus.RUNNING)
    assert pending.status().sandbox_id == pending.sandbox_id
    box = pending.ready(timeout=60, poll_interval=0.05)
    assert box.sandbox_id == pending.sandbox_id
    assert box.run("true").exit_code == 0


def test_a_queued_create_of_the_client_can_be_waited_for_by_connecting(client):
    pending = client.create(wait=False)
    box = Sandbox.connect(pending.sandbox_id)
    assert box.status == SandboxStatus.RUNNING


def test_a_wait_that_is_too_short_leaves_the_sandbox_in_the_queue():
    # Several at once, so that the last one can't be there at once.
    last = [Sandbox.create(wait=False) for _ in range(4)][-1]
    with pytest.raises(SandboxPending) as waited:
        last.ready(timeout=0)
    assert waited.value.sandbox_id == last.sandbox_id
    assert last.ready(timeout=60, poll_interval=0.05).run("true").exit_code == 0


def test_an_image_that_nobody_knows_is_refused_and_leaves_nothing(nothing_leaked):
    with pytest.raises(SandboxError) as refused:
        Sandbox.create(image="no-such-image-anywhere")
    assert "no-such-image-anywhere" in str(refused.value)


def test_get_or_create_creates_then_attaches_then_resumes():
    name = fresh_name()
    first = Sandbox.get_or_create(name, memory_mb=1024)
    assert first.bind_outcome == "created"
    second = Sandbox.get_or_create(name)
    assert (second.bind_outcome, second.sandbox_id) == ("attached", first.sandbox_id)
    first.suspend()
    third = Sandbox.get_or_create(name)
    assert (third.bind_outcome, third.sandbox_id) == ("resumed", first.sandbox_id)
    assert third.status == SandboxStatus.RUNNING


def test_all_who_ask_for_the_same_name_at_once_get_the_same_sandbox():
    name, found = fresh_name(), []

    def ask():
        found.append(Sandbox.get_or_create(name).sandbox_id)

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_suspended_sandbox_resumes_with_its_files_and_processes():
    box = Sandbox.create(name=fresh_name())
    box.write_file("/root/note", b"before")
    started = box.start_process("sleep", ["1000"])
    box.suspend()
    assert box.status == SandboxStatus.SUSPENDED
    assert box.info().sandbox_url
    box.resume()
    assert box.status == SandboxStatus.RUNNING
    assert box.read_file("/root/note").value == b"before"
    assert box.get_process(started.pid).status == "running"


def test_suspend_and_resume_without_waiting_get_there_too(client):
    made = client.create(name=fresh_name())
    client.suspend(made.sandbox_id, wait=False)
    wait_for("it to sleep", lambda: client.get(made.sandbox_id).status == SandboxStatus.SUSPENDED)
    client.resume(made.sandbox_id, wait=False)
    wait_for("it to run", lambda: client.get(made.sandbox_id).status == SandboxStatus.RUNNING)
    client.suspend(made.sandbox_id)
    # Already there is as good as done.
    client.suspend(made.sandbox_id)
    client.resume(made.sandbox_id)
    client.resume(made.sandbox_id)
    assert client.get(made.sandbox_id).status == SandboxStatus.RUNNING


def test_traffic_wakes_a_suspended_sandbox_and_looking_at_it_does_not():
    box = Sandbox.create(name=fresh_name())
    box.suspend()
    assert [box.status, box.info().status] == [SandboxStatus.SUSPENDED] * 2
    box.update(auto_resume=True)
    assert Sandbox.connect(box.sandbox_id).status == SandboxStatus.SUSPENDED
    assert box.run("echo", ["awake"]).stdout == "awake"
    assert box.status == SandboxStatus.RUNNING


def test_without_auto_resume_traffic_is_refused_until_somebody_resumes_it():
    box = Sandbox.create(name=fresh_name(), auto_resume=False)
    assert box.info().auto_resume is False
    box.suspend()
    with pytest.raises(RemoteAPIError) as refused:
        box.run("true")
    # One of these codes would make the package try again for half a minute.
    replayed = {"SANDBOX_UPSTREAM_ERROR", "SANDBOX_NOT_READY", "SANDBOX_UNREACHABLE"}
    assert refused.value.status_code in (409, 503)
    assert refused.value.code and refused.value.code not in replayed
    assert box.status == SandboxStatus.SUSPENDED
    # The flag is changed without waking it.
    assert box.update(auto_resume=True).auto_resume is True
    assert box.status == SandboxStatus.SUSPENDED
    assert box.run("true").exit_code == 0


def test_a_sandbox_without_a_name_can_not_be_suspended_until_it_has_one():
    box = Sandbox.create()
    with pytest.raises(RemoteAPIError) as refused:
        box.suspend()
    assert refused.value.status_code == 400
    assert box.status == SandboxStatus.RUNNING
    name, sandbox_id = fresh_name(), box.sandbox_id
    box.name = name
    assert (box.name, box.info().sandbox_id) == (name, sandbox_id)
    box.suspend()
    assert Sandbox.connect(name).status == SandboxStatus.SUSPENDED


def test_a_sandbox_that_is_renamed_keeps_its_id(client):
    old, new = fresh_name("old"), fresh_name("new")
    box = Sandbox.create(name=old)
    assert client.update_sandbox(box.sandbox_id, name=new).name == new
    assert Sandbox.connect(new).sandbox_id == box.sandbox_id
    with pytest.raises(SandboxNotFoundError):
        Sandbox.connect(old)


def test_an_idle_sandbox_with_a_name_is_suspended(client):
    box = Sandbox.create(name=fresh_name(), timeout_secs=1)
    wait_for("it to sleep", lambda: box.status == SandboxStatus.SUSPENDED)
    assert box.run("echo", ["again"]).stdout == "again"


def test_an_idle_sandbox_without_a_name_is_terminated(client):
    box = Sandbox.create(timeout_secs=1)
    wait_for("it to be gone", lambda: is_gone(client, box.sandbox_id))
    archived = wait_for("the archive to have it", lambda: archive_of(client, box.sandbox_id))
    assert archived.status == SandboxStatus.TERMINATED


def archive_of(client, sandbox_id):
    try:
        return client.get_archived(sandbox_id)
    except SandboxNotFoundError:
        return None


def test_ended_sandboxes_are_in_the_archive_newest_first(client):
    made = [client.create(name=fresh_name("past")).sandbox_id for _ in range(3)]
    for sandbox_id in made:
        client.delete(sandbox_id)
        wait_for("the archive to have it", lambda one=sandbox_id: archive_of(client, one))
    one = client.get_archived(made[0])
    assert (one.sandbox_id, one.status) == (made[0], SandboxStatus.TERMINATED)
    assert abs(one.archived_at.timestamp() - time.time()) < 60
    assert one.name.startswith("past-")
    page = client.list_archived(limit=2)
    assert [info.sandbox_id for info in page.sandboxes] == [made[2], made[1]]
    following = client.list_archived(limit=2, cursor=page.next_cursor)
    assert following.sandboxes[0].sandbox_id == made[0]
    back = client.list_archived(limit=2, cursor=following.prev_cursor, direction="backward")
    assert [info.sandbox_id for info in back.sandboxes] == [made[2], made[1]]


def test_ports_are_exposed_and_taken_back(client):
    sandbox_id = client.create(name=fresh_name()).sandbox_id
    assert client.get_port_access(sandbox_id).exposed_ports == []
    assert client.expose_ports(sandbox_id, [9000, 80]).exposed_ports == [80, 9000]
    client.expose_ports(sandbox_id, [8080], allow_unauthenticated_access=True)
    access = client.get_port_access(sandbox_id)
    assert (access.exposed_ports, access.allow_unauthenticated_access) == ([80, 8080, 9000], True)
    assert client.unexpose_ports(sandbox_id, [80, 9000]).exposed_ports == [8080]
    last = client.unexpose_ports(sandbox_id, [8080])
    assert (last.exposed_ports or [], last.allow_unauthenticated_access) == ([], False)


def test_the_network_is_changed_cleared_and_otherwise_kept():
    box = Sandbox.create(name=fresh_name())
    policy = NetworkConfig(allow_internet_access=True, allow_out=["1.1.1.1"], deny_out=["10.0.0.0/8"])
    changed = box.update(network=policy).network_policy
    assert (changed.allow_out, changed.deny_out) == (["1.1.1.1"], ["10.0.0.0/8"])
    assert box.update(exposed_ports=[80]).network_policy.allow_out == ["1.1.1.1"]
    cleared = box.update(network=CLEAR_NETWORK_POLICY).network_policy
    assert cleared is None or (cleared.allow_internet_access and not cleared.allow_out)


def test_host_names_are_entries_of_a_network_policy():
    box = Sandbox.create(allow_out=["example.com:443", "*.example.org"], deny_out=["bad.example"])
    policy = box.info().network_policy
    assert policy.allow_out == ["example.com", "*.example.org"]
    assert policy.deny_out == ["bad.example"]


def test_a_live_change_to_a_name_that_does_not_resolve_is_refused():
    box = Sandbox.create(name=fresh_name())
    policy = NetworkConfig(allow_internet_access=True, allow_out=["no-such-host.invalid"], deny_out=[])
    with pytest.raises(RemoteAPIError) as refused:
        box.update(network=policy)
    assert refused.value.status_code == 400
    assert "no-such-host.invalid" in refused.value.message


def test_an_address_with_a_scheme_is_refused(nothing_leaked):
    with pytest.raises(RemoteAPIError) as refused:
        Sandbox.create(allow_out=["https://example.com"])
    assert refused.value.status_code == 400
    assert "example.com" in refused.value.message


def test_processors_and_memory_are_resized_live(client):
    box = Sandbox.create(cpus=1.0, memory_mb=1024)
    info = box.update(cpus=2.0, memory_mb=2048, poll_interval=0.05)
    assert (info.resources.cpus, info.resources.memory_mb) == (2.0, 2048)
    assert info.resource_resize.status == "succeeded"
    generation = info.resource_resize.generation
    again = box.wait_for_resource_resize(generation, timeout=10, poll_interval=0.05)
    assert again.resources.memory_mb == 2048
    same = client.wait_for_resource_resize(box.sandbox_id, generation, poll_interval=0.05)
    assert same.resource_resize.generation == generation
    assert box.run("true").exit_code == 0


def test_a_disk_is_not_resized_and_the_refusal_says_so():
    box = Sandbox.create()
    before = box.info().resources.disk_mb
    with pytest.raises(RemoteAPIError) as refused:
        box.update(disk_mb=before + 1024)
    assert refused.value.status_code == 400
    assert "disk" in refused.value.message
    assert box.info().resources.disk_mb == before


def test_a_running_sandbox_is_copied_with_what_it_does(client):
    box = Sandbox.create()
    box.write_file("/root/note", b"the original")
    started = box.start_process("sleep", ["1000"])
    copied = box.copy(times=2)
    assert copied.source_sandbox_id == box.sandbox_id
    assert [one.status for one in copied.sandboxes] == ["running", "running"]
    handles = [client.connect(one.sandbox_id) for one in copied.sandboxes]
    handles[0].write_file("/root/note", b"a copy")
    assert handles[1].read_file("/root/note").value == b"the original"
    assert box.read_file("/root/note").value == b"the original"
    assert handles[1].get_process(started.pid).status == "running"
    once = client.copy(box.sandbox_id, request_timeout=60)
    ids = {box.sandbox_id, *(one.sandbox_id for one in [*copied.sandboxes, *once.sandboxes])}
    assert len(ids) == 4


def test_terminate_is_final_and_may_be_said_twice(client):
    box = Sandbox.create(name=fresh_name())
    sandbox_id = box.sandbox_id
    box.terminate()
    wait_for("it to be gone", lambda: is_gone(client, sandbox_id))
    assert lifecycle("DELETE", f"/sandboxes/{sandbox_id}").status in (200, 202, 204)


def test_a_sandbox_is_created_without_a_way_out():
    box = Sandbox.create(allow_internet_access=False)
    reach = "import socket; socket.create_connection(('1.1.1.1', 53), timeout=3)"
    assert box.run("python3", ["-c", reach]).exit_code != 0
