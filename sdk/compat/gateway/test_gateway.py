"""The official client, in both eras, and published servers through the gateway."""

import asyncio
import contextlib
import traceback

import pytest
from conftest import EVERYTHING
from mcp import Client

ERAS = ["legacy", "2026-07-28"]


def ask(gateway, mode, question):
    async def asked():
        async with Client(gateway.url, mode=mode) as client:
            return await question(client)

    return asyncio.run(asyncio.wait_for(asked(), 90))


def names(gateway, mode="legacy"):
    async def listed(client):
        return [tool.name for tool in (await client.list_tools()).tools]

    return ask(gateway, mode, listed)


def call(gateway, name, arguments, mode="legacy"):
    return ask(gateway, mode, lambda client: client.call_tool(name, arguments))


def python(module):
    return ["--image", "servers", "--env", "PYTHONPATH=/srv/python", "--", "python3", "-m", module]


@pytest.fixture
def every(gateway):
    """The server with a bit of everything, in its older version."""
    with added(gateway, "every", "--image", "everything-2025", "--", *EVERYTHING):
        yield gateway


@pytest.fixture
def daemon(gateway):
    """The daemon itself, as an HTTP API."""
    # Names are asked of the resolver of the host, which need not know this one.
    url = gateway.world.daemon.url.replace("localhost", "127.0.0.1")
    with added(gateway, "torpor", "--url", url, "--openapi", f"{url}/openapi.json"):
        yield gateway


@pytest.fixture
def five(every, daemon):
    with contextlib.ExitStack() as stack:
        for name in ["git", "time", "fetch"]:
            stack.enter_context(added(every, name, *python(f"mcp_server_{name}")))
        yield every


@contextlib.contextmanager
def added(gateway, name, *args):
    gateway.add(name, *args)
    try:
        yield
    finally:
        gateway.run("gateway", "rm", name)


def test_a_published_server_that_drifts_is_held_back_until_approved(every):
    gateway = every
    before = names(gateway)
    assert "every_echo" in before and len(before) >= 8, before
    for mode in ERAS:
        said = call(gateway, "every_echo", {"message": "hello"}, mode)
        assert "hello" in said.content[0].text, said

    # The same command in an image with the newer package.
    newer = gateway.json("gateway", "add", "every", "--replace", "--image", "everything-2026", "--", *EVERYTHING)
    assert newer["problem"] is None and newer["held"] > 0, newer
    held = names(gateway)
    assert "every_echo" not in held and len(held) < len(before), held
    refused = call(gateway, "every_echo", {"message": "hello"})
    assert refused.is_error and "held back" in refused.content[0].text, refused
    diff = gateway.run("gateway", "diff", "every", code=1)
    assert "tool echo (changed)" in diff and "(new)" in diff and "(removed)" in diff, diff
    gateway.run("gateway", "approve", "every")
    for mode in ERAS:
        assert "every_echo" in names(gateway, mode)
        said = call(gateway, "every_echo", {"message": "again"}, mode)
        assert "again" in said.content[0].text, said


def test_a_secret_is_not_in_the_environment_of_a_server(gateway):
    gateway.run("secret", "set", "UPSTREAM", "--host", "api.example.com", stdin="s3cr3t-value")
    env = ["--env", "TOKEN={{SECRET:UPSTREAM}}", "--grant", "UPSTREAM"]
    with added(gateway, "leak", "--image", "everything-2026", *env, "--", *EVERYTHING):
        listed = call(gateway, "leak_get-env", {})
    assert "{{SECRET:UPSTREAM}}" in str(listed.content) and "s3cr3t-value" not in str(listed.content)


def test_five_servers_cost_less_in_search_mode(five):
    gateway = five
    tokens = gateway.json("gateway", "tokens")
    print(gateway.run("gateway", "tokens"))
    assert len(tokens["by_server"]) == 5, tokens
    assert tokens["search_mode"] * 20 < tokens["all_tools"], tokens
    gateway.run("gateway", "client", "set", "root", "--search")
    try:
        assert names(gateway, "2026-07-28") == ["call_tool", "describe_tool", "find_tools"]
        found = call(gateway, "find_tools", {"query": "current time in a timezone"}).structured_content
        assert found["tools"][0]["name"] == "time_get_current_time", found
        arguments = {"name": "time_get_current_time", "arguments": {"timezone": "Europe/Vienna"}}
        told = call(gateway, "call_tool", arguments)
        assert not told.is_error and "Europe/Vienna" in told.content[0].text, told
    finally:
        gateway.run("gateway", "client", "rm", "root")


def test_the_daemon_itself_is_tools_from_its_openapi_document(daemon):
    made = call(daemon, "torpor_createSandbox", {"body": {"name": "from-a-tool"}})
    assert made.structured_content["name"] == "from-a-tool", made
    run = {"path": {"sandbox": "from-a-tool"}, "body": {"command": ["uname"]}}
    ran = call(daemon, "torpor_runCommand", run)
    assert ran.structured_content["stdout"] == "Linux\n", ran


@pytest.mark.parametrize("mode", ERAS)
def test_errors_are_errors_of_the_client(gateway, mode):
    with pytest.raises(Exception) as raised:
        call(gateway, "every_nothing", {}, mode)
    # It comes in groups of groups.
    told = "".join(traceback.format_exception(raised.value))
    assert "there is no every_nothing" in told, told


def test_every_call_is_in_the_audit_without_values(every):
    call(every, "every_echo", {"message": "hello"})
    calls = every.run("gateway", "tail", "-n", "100", "--json")
    assert '"tool":"echo"' in calls and "hello" not in calls and "string(5)" in calls, calls
