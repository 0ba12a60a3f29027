"""The stateful researcher: it reads one page, is suspended, and its program exits; a new program connects to
it by its name, resumes it, reads its state file and goes on, until it has read everything.

    TENSORLAKE_API_URL=http://localhost:8900 python researcher.py

A web server inside the sandbox stands in for the web. It is started once and serves until the end, through
every sleep. Exits with 0 only if all pages were read, each by another program.
"""

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys

from tensorlake.sandbox import Sandbox, SandboxNotFoundError
from timings import Timings, report

STATE = "/workspace/state.json"
PORT = 8000
# The web: each page has a fact and links to others.
PAGES = {
    "index.html": ("Sandboxes are computers that agents work in.", ["sleep.html", "memory.html"]),
    "sleep.html": ("A computer that nobody uses need not run.", ["price.html"]),
    "memory.html": (
        "What is in memory can be written down and read again.",
        ["price.html", "forks.html"],
    ),
    "price.html": ("What sleeps costs its place on disk.", []),
    "forks.html": ("What is written down can be read more than once.", ["index.html"]),
}
# Reads one page of the web and prints its fact and its links.
READ = """
import json, re, sys, urllib.request
page = urllib.request.urlopen(sys.argv[1], timeout=10).read().decode()
print(json.dumps({"fact": re.search("<p>(.*?)</p>", page)[1], "links": re.findall('href="(.*?)"', page)}))
"""


def begin(name, timings):
    """A new researcher, who has read nothing yet."""
    with timings.measure("create"):
        sandbox = Sandbox.create(name=name, cpus=1.0, memory_mb=1024, timeout_secs=600)
    for page, (fact, links) in PAGES.items():
        anchors = "".join(f'<a href="{link}">{link}</a>' for link in links)
        with timings.measure("file write"):
            sandbox.write_file(f"/web/{page}", f"<p>{fact}</p>{anchors}".encode())
    sandbox.write_file("/workspace/read.py", READ.encode())
    web = sandbox.start_process(
        "python3", ["-m", "http.server", str(PORT), "--bind", "127.0.0.1", "--directory", "/web"]
    )
    state = {"web": web.pid, "to_read": ["index.html"], "notes": {}, "programs": []}
    return sandbox, state


def go_on(name, timings):
    """The researcher of that name, awake again, with what it knows."""
    sandbox = Sandbox.connect(name)
    with timings.measure("resume"):
        sandbox.resume(poll_interval=0.05)
    with timings.measure("file read"):
        text = sandbox.read_file(STATE).value
    return sandbox, json.loads(text)


def read_a_page(sandbox, state):
    page = state["to_read"].pop(0)
    # The server may still be starting the first time, and never again.
    url = f"http://127.0.0.1:{PORT}/{page}"
    wait = f"until (exec 3<>/dev/tcp/127.0.0.1/{PORT}) 2>/dev/null; do sleep 0.05; done"
    sandbox.run("bash", ["-c", wait], timeout=30)
    done = sandbox.run("python3", ["/workspace/read.py", url])
    if done.exit_code != 0:
        raise RuntimeError(f"{page}: {done.stderr}")
    found = json.loads(done.stdout)
    state["notes"][page] = found["fact"]
    state["programs"].append(os.getpid())
    known = {*state["notes"], *state["to_read"]}
    state["to_read"] += [link for link in found["links"] if link not in known]


def step(name, first):
    """What one program does: wake the researcher, one page, put it to sleep. Tells it in one JSON line."""
    timings = Timings()
    sandbox, state = begin(name, timings) if first else go_on(name, timings)
    alive = sandbox.get_process(state["web"]).status.value == "running"
    read_a_page(sandbox, state)
    with timings.measure("file write"):
        sandbox.write_file(STATE, json.dumps(state).encode())
    with timings.measure("suspend"):
        sandbox.suspend(poll_interval=0.05)
    print(json.dumps({"state": state, "web_alive": alive, "timings": timings.taken}))


def drive(name, timings, say):
    """Starts one program after another until there is nothing left to read."""
    told = None
    while told is None or told["state"]["to_read"]:
        command = [
            sys.executable,
            __file__,
            "--name",
            name,
            "--step",
            "first" if told is None else "next",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        told = json.loads(done.stdout)
        timings.merge(told["timings"])
        page, fact = list(told["state"]["notes"].items())[-1]
        say(f"program {told['state']['programs'][-1]} read {page}: {fact}")
        if not told["web_alive"]:
            raise RuntimeError("the web server did not survive the sleep")
    return told["state"]


def check(state):
    """What is wrong with the work; nothing if it was really done."""
    if state["notes"] != {page: fact for page, (fact, _) in PAGES.items()}:
        return f"read only {sorted(state['notes'])}"
    if len(set(state["programs"])) != len(PAGES):
        return f"not every page was read by a program of its own: {state['programs']}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default=f"researcher-{secrets.token_hex(3)}", help="of the sandbox")
    parser.add_argument("--step", choices=("first", "next"), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of words")
    parser.add_argument("--strict", action="store_true", help="fail if a published figure is not beaten")
    options = parser.parse_args()
    if options.step:
        step(options.name, options.step == "first")
        return
    say = (lambda text: None) if options.json else print
    timings = Timings()
    try:
        state = drive(options.name, timings, say)
    finally:
        with contextlib.suppress(SandboxNotFoundError):
            Sandbox.connect(options.name).terminate()
    wrong = check(state)
    told = {"ok": wrong is None, "pages": len(state["notes"]), "programs": len(set(state["programs"]))}
    report(told, timings, options.json)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
    if wrong or (options.strict and not timings.all_faster()):
        sys.exit(1)


if __name__ == "__main__":
    main()
