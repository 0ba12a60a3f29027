"""The official clients in every mode, and the conformance suite of both eras, against a real daemon with a real
sandbox: `clients.py DIRECTORY_OF_NODE`. Says what it does, and ends with 1 if anything is not as it should be."""

import asyncio
import os
import pathlib
import socket
import subprocess
import sys
import time

# The gateway reaches servers on this host only if the operator says so.
os.environ["TORPOR_EGRESS_OUTGOING"] = '["127.0.0.0/8"]'

from daemon import World  # noqa: E402
from mcp import Client, StdioServerParameters  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
NODE_DIR = pathlib.Path(sys.argv[1])
NODE = NODE_DIR / "node_modules/node/bin/node"
SUITE = NODE_DIR / "node_modules/@modelcontextprotocol/conformance/dist/index.js"
MODES = ["auto", "legacy", "2026-07-28"]
ERAS = ["2025-11-25", "2026-07-28"]


def say(text):
    print(f"-- {text}", flush=True)


async def python_client(target, mode):
    told = []

    async def progress(done, total, message):
        told.append((done, total, message))

    async with Client(target, mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"run", "read_file", "grep", "fork"} <= set(tools), sorted(tools)
        assert tools["read_file"].annotations.read_only_hint and tools["run"].output_schema
        ran = await client.call_tool("run", {"command": "echo out; echo err >&2; exit 3"})
        assert not ran.is_error and ran.structured_content["exit_code"] == 3, ran
        assert (ran.structured_content["stdout"], ran.structured_content["stderr"]) == ("out\n", "err\n")
        assert "exit code 3" in ran.content[0].text
        path = f"/tmp/{mode}"
        await client.call_tool("write_file", {"path": path, "content": "grüße\n"})
        read = await client.call_tool("read_file", {"path": path})
        assert read.structured_content["content"] == "grüße\n", read
        bad = await client.call_tool("read_file", {"path": "/no/such"})
        assert bad.is_error and "/no/such" in bad.content[0].text, bad
        slow = "for n in 1 2 3; do echo $n; sleep 1; done"
        await client.call_tool("run", {"command": slow}, progress_callback=progress)
        assert len(told) >= 2 and told[-1][0] > told[0][0], told
        return client.protocol_version


async def manage(url):
    async with Client(url) as client:
        made = await client.call_tool("sandbox_create", {"name": "web"})
        assert made.structured_content["sandbox"]["state"] == "running", made
        asleep = await client.call_tool("sandbox_sleep", {"sandbox": "web", "cold": True})
        assert asleep.structured_content["sandbox"]["state"] == "asleep", asleep


async def python_clients(world, web):
    await manage(f"{world.daemon.url}/mcp")
    for mode in MODES:
        say(f"Python client, {mode}: {await python_client(web, mode)}")
    binary = os.environ["TORPOR_BIN"]
    env = {**os.environ, "TORPOR_SERVER": world.daemon.url}
    bridge = StdioServerParameters(command=binary, args=["mcp", "--sandbox", "web"], env=env)
    for mode in MODES:
        say(f"Python client over torpor mcp, {mode}: {await python_client(bridge, mode)}")


def through_the_gateway(world, web):
    """Puts the sandbox's server behind the gateway; its address there."""
    env = {**os.environ, "TORPOR_SERVER": world.daemon.url}
    # Names are asked of the resolver of the host, which need not know this one.
    web = web.replace("localhost", "127.0.0.1")
    add = [os.environ["TORPOR_BIN"], "gateway", "add", "web", "--approve", "--url", web]
    subprocess.run(add, env=env, check=True, stdout=subprocess.DEVNULL)
    return f"{world.daemon.url}/v1/mcp/gateway"


def node(script, url):
    say(f"{script}: {subprocess.run([NODE, script, url], cwd=NODE_DIR, check=True, capture_output=True, text=True).stdout.strip()}")


def suite(name, url, era):
    """Runs the suite; what is expected to fail, and why, is in a file beside this one."""
    expected = HERE / f"expected-{name}-{era}.yml"
    command = [NODE, SUITE, "server", "--url", url, "--spec-version", era, "--expected-failures", expected]
    done = subprocess.run(command, cwd=NODE_DIR, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0:
        print("\n".join(lines[-120:]), done.stderr[-2000:], sep="\n")
        print(f"error: the conformance suite {era} does not pass against {name}")
        return False
    say(f"conformance {era} against {name}: {next((l for l in reversed(lines) if 'passed' in l.lower()), 'passed')}")
    return True


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def with_handler(check):
    """The handler with the tools that the suite names."""
    port = free_port()
    process = subprocess.Popen([os.environ["TORPOR_CONFORMANCE"], f"127.0.0.1:{port}"])
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        return check(f"http://127.0.0.1:{port}/mcp")
    finally:
        process.kill()
        process.wait()


def main():
    world = World()
    try:
        web = f"{world.daemon.url}/v1/sandboxes/web/mcp"
        asyncio.run(python_clients(world, web))
        for script in ["modern.mjs", "legacy.mjs"]:
            node(script, web)
        gateway = through_the_gateway(world, web)
        node("gateway.mjs", gateway)
        passed = []
        for era in ERAS:
            passed.append(suite("sandbox", web, era))
            passed.append(suite("gateway", gateway, era))
            passed.append(with_handler(lambda url: suite("handler", url, era)))
        if not all(passed):
            raise SystemExit(1)
    finally:
        world.remove()


if __name__ == "__main__":
    main()
