"""The swarm: one environment is prepared, saved with its memory, and forked into five analysts.

    TENSORLAKE_API_URL=http://localhost:8900 python swarm.py

Exits with 0 only if all five did their work.
"""

import argparse
import asyncio
import json
import os
import pathlib
import sys
import time
import urllib.request

import project
import tools
from tensorlake.sandbox import AsyncSandbox, CheckpointType, Sandbox
from timings import Timings, report

HERE = pathlib.Path(__file__).resolve().parent
ANALYSES = ("names", "style", "complexity", "security", "promises")
PACKAGES = ("pyflakes==3.2.0", "pycodestyle==2.12.1")
SEVERITIES = ("high", "medium", "low")


def prepare(timings, say):
    """The environment that everybody begins with: tools, project, and a checkpoint of it."""
    with timings.measure("create"):
        base = Sandbox.create(cpus=1.0, memory_mb=1024, timeout_secs=600)
    with base:
        say(f"base {base.sandbox_id}: installing {', '.join(PACKAGES)}")
        say(f"installed {tools.install(base, PACKAGES)}")
        for path, text in project.FILES.items():
            with timings.measure("file write"):
                base.write_file(f"/workspace/project/{path}", text.encode())
        base.upload_file(HERE / "analyse.py", "/workspace/analyse.py")
        with timings.measure("file read"):
            back = base.read_file("/workspace/project/shop/cart.py").value
        assert back.decode() == project.FILES["shop/cart.py"]
        # Once ahead, so that what the analyses need is compiled and in memory in every fork.
        warm = base.run("python3", ["/workspace/analyse.py"], env={"ANALYSIS": "names"})
        assert warm.exit_code == 0, warm.stderr
        begun = time.perf_counter()
        snapshot = base.checkpoint(checkpoint_type=CheckpointType.MEMORY, poll_interval=0.05)
        say(f"checkpoint {snapshot.snapshot_id}: {(time.perf_counter() - begun) * 1000:.0f} ms")
    return snapshot.snapshot_id


async def analyse(snapshot, analysis, timings):
    """One fork, one analysis, one line of JSON."""
    begun = time.perf_counter()
    fork = await AsyncSandbox.create(snapshot_id=snapshot, allow_internet_access=False)
    timings.add("warm fork", (time.perf_counter() - begun) * 1000)
    async with fork:
        done = await fork.run("python3", ["/workspace/analyse.py"], env={"ANALYSIS": analysis})
        if done.exit_code != 0:
            raise RuntimeError(f"{analysis}: {done.stderr}")
        policy = (await fork.info()).network_policy
        if policy is None or policy.allow_internet_access:
            raise RuntimeError(f"{analysis}: the fork has a way out")
        return {"sandbox": fork.sandbox_id, **json.loads(done.stdout)}


async def swarm(snapshot, timings):
    """All analyses one after another, then all at once."""
    begun = time.perf_counter()
    one_by_one = [await analyse(snapshot, analysis, timings) for analysis in ANALYSES]
    sequential = time.perf_counter() - begun
    begun = time.perf_counter()
    # How long a fork takes while four others begin is another question than how long a fork takes.
    crowd = Timings()
    at_once = await asyncio.gather(*(analyse(snapshot, analysis, crowd) for analysis in ANALYSES))
    return one_by_one, sequential, at_once, time.perf_counter() - begun, crowd.taken["warm fork"]


def ranked(results):
    """Every finding with its analysis, the worst first."""
    findings = [
        {"analysis": result["analysis"], **finding}
        for result in results
        for finding in result["findings"]
    ]
    order = {severity: n for n, severity in enumerate(SEVERITIES)}
    return sorted(findings, key=lambda one: (order[one["severity"]], one["file"], one["line"]))


def lead(findings):
    """The lead's word: of a language model if one is configured, else the plain ranking."""
    lines = [
        f"{one['severity']:6} {one['file']}:{one['line']} {one['text']} ({one['analysis']})"
        for one in findings
    ]
    base = os.environ.get("OPENAI_BASE_URL")
    if not base:
        return "\n".join(lines[:10] + [f"… and {len(lines) - 10} more"] if len(lines) > 10 else lines)
    question = "Merge these findings of five reviewers into a short list of what to fix first:\n"
    body = {
        "model": os.environ.get("OPENAI_MODEL", "default"),
        "messages": [{"role": "user", "content": question + "\n".join(lines)}],
    }
    asked = urllib.request.Request(
        f"{base.rstrip('/')}/chat/completions",
        data=json.dumps(body).encode(),
        headers={
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}",
        },
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def check(one_by_one, at_once):
    """What is wrong with the work; nothing if it was really done."""
    for results in (one_by_one, at_once):
        if [result["analysis"] for result in results] != list(ANALYSES):
            return "an analysis is missing"
        if len({result["sandbox"] for result in results}) != len(ANALYSES):
            return "two analyses ran in the same fork"
        for result in results:
            if not result["findings"]:
                return f"{result['analysis']} found nothing, and there is something"
    if ranked(one_by_one) != ranked(at_once):
        return "the same analyses found other things"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of words")
    parser.add_argument("--keep-snapshot", action="store_true", help="leave the checkpoint there")
    parser.add_argument("--strict", action="store_true", help="fail if a published figure is not beaten")
    options = parser.parse_args()
    say = (lambda text: None) if options.json else print
    timings = Timings()
    snapshot = prepare(timings, say)
    try:
        one_by_one, sequential, at_once, parallel, crowd = asyncio.run(swarm(snapshot, timings))
    finally:
        if options.keep_snapshot:
            say(f"kept: {snapshot}")
        else:
            Sandbox.delete_snapshot(snapshot)
    for result in at_once:
        say(json.dumps({"analysis": result["analysis"], "findings": len(result["findings"])}))
    speed_up = sequential / parallel
    say(
        f"\none after another {sequential:.2f} s, at once {parallel:.2f} s: {speed_up:.1f} times as fast,"
    )
    efficiency = speed_up / len(ANALYSES)
    say(
        f"an efficiency of {efficiency:.0%} with {os.cpu_count()} processors for {len(ANALYSES)} forks\n"
    )
    say(f"a fork took {max(crowd):.0f} ms at most while the five began at once\n")
    findings = ranked(at_once)
    summary = lead(findings)
    say(summary)
    wrong = check(one_by_one, at_once)
    told = {
        "ok": wrong is None,
        "findings": len(findings),
        "sequential_s": round(sequential, 3),
        "parallel_s": round(parallel, 3),
        "speed_up": round(speed_up, 2),
        "efficiency": round(efficiency, 2),
        "slowest_of_five_forks_at_once_ms": round(max(crowd), 1),
        "summary": summary,
    }
    report(told, timings, options.json)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
    if wrong or (options.strict and not timings.all_faster()):
        sys.exit(1)


if __name__ == "__main__":
    main()
