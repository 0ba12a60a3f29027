"""Pools of sandboxes that are ready ahead, and claims on them."""

import pytest
from tensorlake.sandbox import (
    CLEAR_NETWORK_POLICY,
    FileSystemMount,
    NetworkConfig,
    PoolInUseError,
    PoolNotFoundError,
    RemoteAPIError,
    Sandbox,
    SandboxStatus,
)

from helpers import BASE_IMAGE, lifecycle, own_list, wait_for


@pytest.fixture
def pool(client):
    """A pool with one sandbox ready ahead."""
    made = client.create_pool(
        image=BASE_IMAGE, cpus=1.0, memory_mb=1024, max_containers=3, warm_containers=1
    )
    assert made.namespace == "default"
    return made.pool_id


def idle(client, pool):
    containers = client.get_pool(pool).containers or []
    return [one for one in containers if one.state == "Idle"]


def test_a_pool_tells_what_it_is(client, pool):
    info = client.get_pool(pool)
    assert (info.pool_id, info.namespace, info.image) == (pool, "default", BASE_IMAGE)
    assert (info.resources.cpus, info.resources.memory_mb) == (1.0, 1024)
    assert (info.max_containers, info.warm_containers, info.timeout_secs) == (3, 1, 0)
    assert pool in [one.pool_id for one in client.list_pools()]
    wait_for("one to be ready", lambda: idle(client, pool))


def test_a_claim_is_a_running_sandbox_of_the_pool(client, pool):
    wait_for("one to be ready", lambda: idle(client, pool))
    claimed = client.claim(pool)
    assert claimed.status == SandboxStatus.RUNNING
    info = client.get(claimed.sandbox_id)
    assert (info.pool_id, info.status) == (pool, SandboxStatus.RUNNING)
    assert client.connect(claimed.sandbox_id).run("echo", ["claimed"]).stdout == "claimed"
    containers = client.get_pool(pool).containers
    assert claimed.sandbox_id in [one.sandbox_id for one in containers]
    # The pool is filled up again.
    wait_for("another to be ready", lambda: idle(client, pool))


def test_a_sandbox_is_created_from_a_pool(client, pool):
    with Sandbox.create(pool_id=pool) as box:
        assert box.run("true").exit_code == 0
        box.update(name="named-after-the-claim")
        assert Sandbox.connect("named-after-the-claim").sandbox_id == box.sandbox_id


def test_a_claim_is_made_even_when_none_is_ready(client):
    empty = client.create_pool(image=BASE_IMAGE, warm_containers=0, max_containers=2).pool_id
    assert client.claim(empty).status == SandboxStatus.RUNNING


def test_a_pool_is_replaced_and_keeps_its_network_unless_told_otherwise(client):
    policy = NetworkConfig(allow_internet_access=False)
    pool = client.create_pool(image=BASE_IMAGE, warm_containers=0, network=policy).pool_id
    changed = client.update_pool(pool, BASE_IMAGE, memory_mb=2048, warm_containers=0, max_containers=5)
    assert (changed.resources.memory_mb, changed.max_containers) == (2048, 5)
    assert client.get_pool(pool).network_policy.allow_internet_access is False
    claimed = client.claim(pool)
    assert client.get(claimed.sandbox_id).network_policy.allow_internet_access is False
    client.update_pool(pool, BASE_IMAGE, warm_containers=0, network=CLEAR_NETWORK_POLICY)
    cleared = client.get_pool(pool).network_policy
    assert cleared is None or cleared.allow_internet_access


def test_a_pool_in_use_is_not_deleted_and_an_unused_one_is(client, pool):
    claimed = client.claim(pool)
    with pytest.raises(PoolInUseError):
        client.delete_pool(pool)
    client.delete(claimed.sandbox_id)

    def deleted():
        try:
            client.delete_pool(pool)
        except PoolInUseError:
            return False
        return True

    wait_for("the pool to be out of use", deleted)
    with pytest.raises(PoolNotFoundError):
        client.get_pool(pool)
    assert own_list("pools") == []


def test_a_pool_that_nobody_knows_is_not_found(client, nothing_leaked):
    for ask in (client.get_pool, client.delete_pool):
        with pytest.raises(PoolNotFoundError):
            ask("no-such-pool")
    with pytest.raises(PoolNotFoundError):
        client.update_pool("no-such-pool", BASE_IMAGE)
    with pytest.raises(RemoteAPIError) as refused:
        client.claim("no-such-pool")
    assert refused.value.status_code == 404


def test_a_claim_with_file_systems_that_are_not_there_is_refused_and_takes_nothing(client, pool, nothing_leaked):
    mounts = [FileSystemMount(file_system_id="skills", mount_path="/mnt/skills")]
    with pytest.raises(RemoteAPIError) as refused:
        client.claim(pool, file_systems=mounts)
    assert refused.value.status_code == 404
    # Had it been granted, the answer would have to say that the mounts were made.
    body = {"file_systems": [{"file_system_id": "a", "mount_path": "/m"}]}
    answer = lifecycle("POST", f"/sandbox-pools/{pool}/sandboxes", body=body)
    assert answer.status == 404


def test_a_pool_that_makes_no_sense_is_refused(client, nothing_leaked):
    for wrong in ({"image": "no-such-image-anywhere"}, {"image": BASE_IMAGE, "warm_containers": -1}):
        with pytest.raises(RemoteAPIError) as refused:
            client.create_pool(**wrong)
        assert refused.value.status_code in (400, 404, 422)
