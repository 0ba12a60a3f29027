"""Checkpoints of both kinds, and sandboxes that begin from one."""

import time

import pytest
from tensorlake.sandbox import (
    CheckpointType,
    RemoteAPIError,
    Sandbox,
    SandboxStatus,
    SnapshotStatus,
    SnapshotType,
    SnapshotWaitCondition,
)

from helpers import BASE_IMAGE, fresh_name, wait_for

COUNTER = """
import os, time
n = 0
while True:
    n += 1
    # Whole at every moment: whoever reads it while it is emptied gets less than it was told.
    with open("/tmp/n.new", "w") as file:
        file.write(str(n))
    os.rename("/tmp/n.new", "/tmp/n")
    time.sleep(0.02)
"""


def count(box):
    return int(box.read_file("/tmp/n").value or b"0")


@pytest.fixture
def origin():
    """A sandbox with a file and a process that counts, and the number of that process."""
    box = Sandbox.create(memory_mb=1024)
    box.write_file("/root/note", b"of the origin")
    started = box.start_process("python3", ["-c", COUNTER])
    wait_for("the counter", lambda: box.run("test", ["-s", "/tmp/n"]).exit_code == 0)
    return box, started.pid


def test_a_memory_checkpoint_goes_on_where_it_was(origin):
    box, pid = origin
    before = count(box)
    snapshot = box.checkpoint(checkpoint_type=CheckpointType.MEMORY, poll_interval=0.05)
    assert snapshot.status in (SnapshotStatus.LOCAL_READY, SnapshotStatus.COMPLETED)
    assert (snapshot.sandbox_id, snapshot.snapshot_type) == (box.sandbox_id, SnapshotType.MEMORY)
    assert (snapshot.namespace, snapshot.size_bytes > 0) == ("default", True)
    assert abs(snapshot.created_at.timestamp() - time.time()) < 60
    # It survives the sandbox that it is of.
    box.terminate()
    fork = Sandbox.create(snapshot_id=snapshot.snapshot_id)
    assert fork.sandbox_id != snapshot.sandbox_id
    assert fork.read_file("/root/note").value == b"of the origin"
    assert fork.get_process(pid).status == "running"
    # It counted on: from what it had in memory, not from nothing.
    wait_for("the counter to go on", lambda: count(fork) >= before)
    assert fork.info().resources.memory_mb == 1024


def test_a_filesystem_checkpoint_has_files_and_no_processes_and_may_be_larger(origin, client):
    box, _ = origin
    snapshot = box.checkpoint(
        checkpoint_type=CheckpointType.FILESYSTEM,
        wait_until=SnapshotWaitCondition.COMPLETED,
        poll_interval=0.05,
    )
    assert snapshot.status == SnapshotStatus.COMPLETED
    assert snapshot.snapshot_type == SnapshotType.FILESYSTEM
    fork = Sandbox.create(snapshot_id=snapshot.snapshot_id, cpus=2.0, memory_mb=2048)
    assert fork.read_file("/root/note").value == b"of the origin"
    assert fork.run("pgrep", ["-f", "/tmp/[n]"]).stdout == ""
    info = fork.info()
    assert (info.resources.cpus, info.resources.memory_mb) == (2.0, 2048)
    assert box.status == SandboxStatus.RUNNING


def test_a_memory_checkpoint_keeps_its_resources(origin):
    box, _ = origin
    snapshot = box.checkpoint(checkpoint_type=CheckpointType.MEMORY, poll_interval=0.05)
    with pytest.raises(RemoteAPIError) as refused:
        Sandbox.create(snapshot_id=snapshot.snapshot_id, cpus=2.0, memory_mb=4096)
    assert refused.value.status_code in (400, 422)


def test_a_checkpoint_without_a_kind_is_of_the_files(origin):
    box, _ = origin
    snapshot = box.checkpoint(poll_interval=0.05)
    assert snapshot.snapshot_type == SnapshotType.FILESYSTEM


def test_a_checkpoint_that_nobody_waits_for_is_taken_too(origin):
    box, _ = origin
    assert box.checkpoint(wait=False, checkpoint_type=CheckpointType.MEMORY) is None

    def taken():
        ready = (SnapshotStatus.LOCAL_READY, SnapshotStatus.COMPLETED)
        return [one for one in box.list_snapshots() if one.status in ready]

    assert wait_for("the snapshot", taken)[0].snapshot_type == SnapshotType.MEMORY


def test_snapshots_are_listed_found_and_deleted(origin, client):
    box, _ = origin
    one = client.snapshot_and_wait(box.sandbox_id, snapshot_type=SnapshotType.MEMORY, poll_interval=0.05)
    two = client.snapshot_and_wait(box.sandbox_id, poll_interval=0.05, wait_until="completed")
    made = {one.snapshot_id, two.snapshot_id}
    assert {info.snapshot_id for info in client.list_snapshots()} == made
    assert {info.snapshot_id for info in client.list_sandbox_snapshots(box.sandbox_id)} == made
    assert {info.snapshot_id for info in box.list_snapshots()} == made
    assert Sandbox.get_snapshot(one.snapshot_id).sandbox_id == box.sandbox_id
    assert client.get_snapshot(two.snapshot_id).status == SnapshotStatus.COMPLETED
    assert Sandbox.delete_snapshot(one.snapshot_id) is None
    client.delete_snapshot(two.snapshot_id)
    assert list(client.list_snapshots()) == []
    for ask in (Sandbox.get_snapshot, Sandbox.delete_snapshot):
        with pytest.raises(RemoteAPIError) as refused:
            ask(one.snapshot_id)
        assert refused.value.status_code == 404


def test_a_snapshot_begins_in_progress_and_is_told_by_its_id(origin, client):
    box, _ = origin
    begun = client.snapshot(box.sandbox_id, snapshot_type=SnapshotType.MEMORY)
    known = (SnapshotStatus.IN_PROGRESS, SnapshotStatus.LOCAL_READY, SnapshotStatus.COMPLETED)
    assert begun.status in known
    assert client.get_snapshot(begun.snapshot_id).snapshot_id == begun.snapshot_id


def test_a_suspended_sandbox_is_saved_without_waking(client):
    box = Sandbox.create(name=fresh_name())
    box.write_file("/root/note", b"asleep")
    box.suspend()
    snapshot = box.checkpoint(checkpoint_type=CheckpointType.MEMORY, poll_interval=0.05)
    assert box.status == SandboxStatus.SUSPENDED
    fork = Sandbox.create(snapshot_id=snapshot.snapshot_id, name=fresh_name("fork"))
    assert fork.read_file("/root/note").value == b"asleep"


def test_forks_of_one_snapshot_are_independent(origin):
    box, _ = origin
    snapshot = box.checkpoint(checkpoint_type=CheckpointType.MEMORY, poll_interval=0.05)
    forks = [Sandbox.create(snapshot_id=snapshot.snapshot_id) for _ in range(2)]
    forks[0].write_file("/root/note", b"of the first fork")
    assert forks[1].read_file("/root/note").value == b"of the origin"
    draw = ["-c", "import os; print(os.urandom(16).hex())"]
    random = [fork.run("python3", draw).stdout for fork in forks]
    assert len(random[0]) == 32
    assert random[0] != random[1]


def test_a_fork_may_be_without_a_way_out(origin):
    box, _ = origin
    snapshot = box.checkpoint(checkpoint_type=CheckpointType.MEMORY, poll_interval=0.05)
    fork = Sandbox.create(snapshot_id=snapshot.snapshot_id, allow_internet_access=False)
    assert fork.info().network_policy.allow_internet_access is False


def test_an_unknown_snapshot_is_not_found(nothing_leaked):
    with pytest.raises(RemoteAPIError) as refused:
        Sandbox.create(snapshot_id="no-such-snapshot")
    assert refused.value.status_code == 404


def test_a_snapshot_tells_its_image(origin):
    box, _ = origin
    snapshot = box.checkpoint(poll_interval=0.05)
    assert snapshot.base_image in (BASE_IMAGE, None)
