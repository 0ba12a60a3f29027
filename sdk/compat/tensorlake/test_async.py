"""The asynchronous twins of everything: `AsyncSandbox` and `AsyncSandboxClient`."""

import asyncio
import socket

import pytest
from tensorlake.sandbox import (
    AsyncSandbox,
    AsyncSandboxClient,
    AsyncTcpTunnel,
    CheckpointType,
    NetworkConfig,
    PoolInUseError,
    PoolNotFoundError,
    ProcessStatus,
    RemoteAPIError,
    SandboxError,
    SandboxNotFoundError,
    SandboxStatus,
    SnapshotType,
    StdinMode,
)

from helpers import BASE_IMAGE, fresh_name

READY = {"poll_interval": 0.05}
SERVE = """
import socket
listener = socket.create_server(("127.0.0.1", 7100))
while True:
    link = listener.accept()[0]
    link.sendall(b"served")
    link.close()
"""


@pytest.fixture
async def box():
    return await AsyncSandbox.create(image=BASE_IMAGE, name=fresh_name("async"))


@pytest.fixture
async def async_client():
    async with AsyncSandboxClient() as client:
        yield client


async def becomes(what, look):
    """Asks until the answer is true; the twin of `wait_for`."""
    async with asyncio.timeout(60):
        while not (found := await look()):
            await asyncio.sleep(0.02)
        return found


async def test_a_sandbox_is_created_described_and_gone_after_its_block():
    async with await AsyncSandbox.create(name=fresh_name("async")) as box:
        assert await box.status() == SandboxStatus.RUNNING
        info = await box.info()
        assert info.sandbox_id == box.sandbox_id
        assert (await box.run("echo", ["hello"])).stdout == "hello"
        assert (await box.health()).healthy
        assert (await box.daemon_info()).version
        assert len(box.trace_id) == 32
        assert box.bind_outcome is None
        assert await box.list_file_systems() == []
        sandbox_id = box.sandbox_id
    async with AsyncSandboxClient() as client:
        assert sandbox_id not in [info.sandbox_id for info in await client.list()]


async def test_twenty_commands_run_at_once(box):
    results = await asyncio.gather(*(box.run("echo", [str(n)]) for n in range(20)))
    assert [result.stdout for result in results] == [str(n) for n in range(20)]


async def test_three_sandboxes_are_created_at_once():
    boxes = await asyncio.gather(*(AsyncSandbox.create() for _ in range(3)))
    assert len({box.sandbox_id for box in boxes}) == 3
    await asyncio.gather(*(box.terminate() for box in boxes))


async def test_files_are_written_read_uploaded_listed_and_deleted(box, tmp_path):
    (tmp_path / "local").write_bytes(b"uploaded")
    await box.write_file("/tmp/place/a b", b"written")
    await box.upload_file(tmp_path / "local", "/tmp/place/local")
    assert (await box.read_file("/tmp/place/a b")).value == b"written"
    assert (await box.read_file("/tmp/place/local")).value == b"uploaded"
    names = {entry.name for entry in (await box.list_directory("/tmp/place")).entries}
    assert names == {"a b", "local"}
    await box.delete_file("/tmp/place/local")
    with pytest.raises(RemoteAPIError) as refused:
        await box.read_file("/tmp/place/local")
    assert refused.value.status_code == 404


async def test_a_process_is_written_to_followed_and_ends(box):
    started = await box.start_process("cat", stdin_mode=StdinMode.PIPE)
    await box.write_stdin(started.pid, b"one\ntwo\n")
    await box.close_stdin(started.pid)
    assert [event.line for event in await box.follow_stdout(started.pid)] == ["one", "two"]
    assert [event.line for event in await box.follow_output(started.pid)] == ["one", "two"]
    assert list(await box.follow_stderr(started.pid)) == []
    assert (await box.get_stdout(started.pid)).lines == ["one", "two"]
    assert (await box.get_stderr(started.pid)).lines == []
    assert (await box.get_output(started.pid)).line_count == 2
    assert (await box.get_process(started.pid)).exit_code == 0


async def test_processes_are_listed_signalled_restarted_and_killed(box):
    one = await box.start_process("sleep", ["1000"])
    two = await box.start_process("sleep", ["1000"], name="managed")
    assert {one.pid, two.pid} <= {info.pid for info in await box.list_processes()}
    assert (await box.send_signal(one.pid, 15)).success

    async def ended():
        return (await box.get_process(one.pid)).status == ProcessStatus.SIGNALED

    await becomes("it to end", ended)
    restarted = await box.restart_process("managed")
    assert restarted.pid != two.pid
    await box.kill_process("managed")


async def test_a_terminal_works(box):
    seen, codes = bytearray(), []
    pty = await box.create_pty("sh", rows=20, cols=70, on_data=seen.extend, on_exit=codes.append)
    assert pty.connected
    await pty.send_input("stty size\n")
    await becomes("its size", lambda: shows(seen, b"20 70"))
    await pty.resize(cols=90, rows=25)
    await pty.send_input("stty size\n")
    await becomes("its new size", lambda: shows(seen, b"25 90"))
    await pty.disconnect()
    assert await pty.connect() is pty
    await pty.send_input("exit 5\n")
    assert await pty.wait(timeout=30) == 5
    assert codes == [5]


async def shows(seen, text):
    return text in seen


async def test_a_terminal_is_found_again_and_killed(box):
    session = (await box.create_pty_session("sh")).value
    assert session["token"] not in box.pty_ws_url(session["session_id"], session["token"])
    seen = bytearray()
    pty = await box.connect_pty(session["session_id"], session["token"])
    pty.on_data(seen.extend).on_exit(lambda code: None)
    await pty.send_input("echo found\n")
    await becomes("the answer", lambda: shows(seen, b"found"))
    await pty.kill()
    with pytest.raises(SandboxError, match="terminated"):
        await pty.wait(timeout=30)


async def test_a_tunnel_carries_bytes(box):
    await box.start_process("python3", ["-c", SERVE])

    async def served():
        return (await box.run("bash", ["-c", "exec 3<>/dev/tcp/127.0.0.1/7100"])).exit_code == 0

    await becomes("the server", served)
    async with await box.create_tunnel(7100, local_port=0) as tunnel:
        assert await asyncio.to_thread(read_all, tunnel.local_port) == b"served"
    headers = {"Host": f"{box.sandbox_id}.local"}
    other = await AsyncTcpTunnel.listen(
        base_url=box._base_url, ws_headers=headers, remote_port=7100, local_port=0
    )
    assert await asyncio.to_thread(read_all, other.local_port) == b"served"
    await other.close()


def read_all(port):
    data = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
        while part := link.recv(100):
            data += part
    return data


async def test_a_sandbox_sleeps_wakes_and_is_found_by_its_name(box):
    name = (await box.info()).name
    await box.suspend()
    assert await box.status() == SandboxStatus.SUSPENDED
    await box.resume()
    assert await box.status() == SandboxStatus.RUNNING
    found = await AsyncSandbox.connect(name)
    assert found.sandbox_id == box.sandbox_id
    found.close()
    await box.suspend()
    bound = await AsyncSandbox.get_or_create(name)
    assert (bound.bind_outcome, bound.sandbox_id) == ("resumed", box.sandbox_id)


async def test_a_queued_create_is_ready_later(async_client):
    pending = await AsyncSandbox.create(wait=False)
    box = await pending.ready(timeout=60, **READY)
    assert (await pending.status()).sandbox_id == box.sandbox_id
    queued = await async_client.create(wait=False)
    assert (await queued.ready(timeout=60, **READY)).sandbox_id == queued.sandbox_id


async def test_a_checkpoint_is_taken_and_forked_five_times_at_once(box):
    await box.write_file("/root/note", b"forked")
    snapshot = await box.checkpoint(checkpoint_type=CheckpointType.MEMORY, **READY)
    assert [info.snapshot_id for info in await box.list_snapshots()] == [snapshot.snapshot_id]

    async def fork():
        async with await AsyncSandbox.create(snapshot_id=snapshot.snapshot_id) as made:
            return (await made.read_file("/root/note")).value

    assert await asyncio.gather(*(fork() for _ in range(5))) == [b"forked"] * 5


async def test_a_sandbox_is_copied_and_changed(box, async_client):
    copied = await box.copy(times=1)
    assert copied.sandboxes[0].status == "running"
    by_client = await async_client.copy(box.sandbox_id, times=1)
    assert by_client.source_sandbox_id == box.sandbox_id
    name = fresh_name("renamed")
    assert (await box.update(name=name, exposed_ports=[80])).name == name
    resized = await box.update(memory_mb=2048, **READY)
    generation = resized.resource_resize.generation
    assert (await box.wait_for_resource_resize(generation, **READY)).resources.memory_mb == 2048
    same = await async_client.wait_for_resource_resize(box.sandbox_id, generation, **READY)
    assert same.resource_resize.status == "succeeded"


async def test_logs_are_read(box, async_client):
    await box.start_process("echo", ["a line for the logs"])

    async def logged():
        return (await box.get_logs(body="for the logs")).logs

    assert (await becomes("the line", logged))[0].body == "a line for the logs"
    assert (await box.list_log_processes()).processes
    assert (await async_client.get_logs(box.sandbox_id, tail=1)).logs
    assert (await async_client.list_log_processes(box.sandbox_id)).processes


async def test_file_systems_that_are_not_there_are_refused(box, async_client):
    attempts = [
        box.attach_file_system("skills", "/mnt/skills"),
        box.detach_file_system("/mnt/skills"),
        async_client.attach_file_system(box.sandbox_id, "skills", "/mnt/skills"),
        async_client.detach_file_system(box.sandbox_id, "/mnt/skills"),
    ]
    for attempt in attempts:
        with pytest.raises(RemoteAPIError) as refused:
            await attempt
        assert refused.value.status_code == 400


async def test_the_client_has_a_whole_life_of_a_sandbox(async_client):
    made = await async_client.create(name=fresh_name("client"))
    sandbox_id = made.sandbox_id
    assert (await async_client.get(sandbox_id)).status == SandboxStatus.RUNNING
    assert sandbox_id in [info.sandbox_id for info in await async_client.list()]
    connected = await async_client.connect(sandbox_id)
    assert (await connected.run("true")).exit_code == 0
    await async_client.suspend(sandbox_id)
    assert (await async_client.get(sandbox_id)).status == SandboxStatus.SUSPENDED
    await async_client.resume(sandbox_id)
    policy = NetworkConfig(allow_internet_access=False)
    changed = await async_client.update_sandbox(sandbox_id, network=policy)
    assert changed.network_policy.allow_internet_access is False
    assert (await async_client.expose_ports(sandbox_id, [80, 81])).exposed_ports == [80, 81]
    assert (await async_client.unexpose_ports(sandbox_id, [81])).exposed_ports == [80]
    assert (await async_client.get_port_access(sandbox_id)).exposed_ports == [80]
    await async_client.delete(sandbox_id)

    async def archived():
        try:
            return await async_client.get_archived(sandbox_id)
        except SandboxNotFoundError:
            return None

    assert (await becomes("the archive to have it", archived)).status == SandboxStatus.TERMINATED
    newest = (await async_client.list_archived(limit=1)).sandboxes[0]
    assert newest.sandbox_id == sandbox_id


async def test_the_client_connects_to_what_it_creates(async_client):
    async with await async_client.create_and_connect() as box:
        assert (await box.run("true")).exit_code == 0


async def test_the_client_takes_lists_and_deletes_snapshots(async_client):
    made = await async_client.create()
    begun = await async_client.snapshot(made.sandbox_id, snapshot_type=SnapshotType.MEMORY)
    waited = await async_client.snapshot_and_wait(made.sandbox_id, **READY)
    assert waited.snapshot_type == SnapshotType.FILESYSTEM
    ids = {begun.snapshot_id, waited.snapshot_id}
    assert {info.snapshot_id for info in await async_client.list_snapshots()} == ids
    of_it = await async_client.list_sandbox_snapshots(made.sandbox_id)
    assert {info.snapshot_id for info in of_it} == ids
    assert (await async_client.get_snapshot(waited.snapshot_id)).sandbox_id == made.sandbox_id
    await async_client.delete_snapshot(waited.snapshot_id)
    with pytest.raises(RemoteAPIError):
        await async_client.get_snapshot(waited.snapshot_id)


async def test_the_client_has_pools(async_client):
    pool = (await async_client.create_pool(image=BASE_IMAGE, warm_containers=0)).pool_id
    assert pool in [info.pool_id for info in await async_client.list_pools()]
    changed = await async_client.update_pool(pool, BASE_IMAGE, warm_containers=0, max_containers=4)
    assert (changed.max_containers, (await async_client.get_pool(pool)).max_containers) == (4, 4)
    claimed = await async_client.claim(pool)
    assert claimed.status == SandboxStatus.RUNNING
    await async_client.delete(claimed.sandbox_id)

    async def deleted():
        try:
            await async_client.delete_pool(pool)
        except PoolInUseError:  # Until the sandbox is gone.
            return False
        return True

    await becomes("the pool to go", deleted)
    with pytest.raises(PoolNotFoundError):
        await async_client.get_pool(pool)


async def test_clients_for_localhost_and_for_another_address_are_the_same(world):
    local = AsyncSandboxClient.for_localhost(api_url=world.daemon.url)
    elsewhere = AsyncSandboxClient.for_cloud(api_key="any", api_url=world.daemon.url)
    made = await local.create()
    assert (await elsewhere.get(made.sandbox_id)).sandbox_id == made.sandbox_id
    await local.close()
    await elsewhere.close()
