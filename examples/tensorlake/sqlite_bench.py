"""The SQLite benchmark: the same script in a sandbox and on this host, and the ratio.

    TENSORLAKE_API_URL=http://localhost:8900 python sqlite_bench.py

Exits with 0 only if both computed the same.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from tensorlake.sandbox import Sandbox

WORK = pathlib.Path(__file__).resolve().parent / "sqlite_work.py"
# Seconds that the makers of the package publish for their own service, with 2 processors and 4 GB. Their
# script does not do exactly the same, and ran on another machine.
PUBLISHED = {"60k rows, WAL": 2.45, "25k rows, synchronous=FULL": 1.64, "250k rows": 9.45}


def inside(times):
    with Sandbox.create(cpus=2.0, memory_mb=4096, timeout_secs=600) as sandbox:
        sandbox.upload_file(WORK, "/workspace/sqlite_work.py")
        sandbox.run("mkdir", ["-p", "/workspace/data"])
        for _ in range(times):
            done = sandbox.run("python3", ["/workspace/sqlite_work.py", "/workspace/data"])
            if done.exit_code != 0:
                raise RuntimeError(done.stderr)
            yield json.loads(done.stdout)


def outside(times):
    for _ in range(times):
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, WORK, directory]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            yield json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3, help="how often; the mean counts [3]")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of words")
    options = parser.parse_args()
    host, sandbox = list(outside(options.times)), list(inside(options.times))
    lines = []
    for name, published in PUBLISHED.items():
        here = statistics.mean(one["seconds"][name] for one in host)
        there = statistics.mean(one["seconds"][name] for one in sandbox)
        lines.append(
            {
                "what": name,
                "sandbox_s": round(there, 2),
                "host_s": round(here, 2),
                "ratio": round(there / here, 2),
                "published_s": published,
            }
        )
    same = all(one["answers"] == host[0]["answers"] for one in [*host, *sandbox])
    fsync = {
        "sandbox": statistics.median(one["fsync_us"] for one in sandbox),
        "host": statistics.median(one["fsync_us"] for one in host),
    }
    # An fsync that costs much less than the host's own does not wait for the host's disk.
    durable = fsync["sandbox"] >= fsync["host"] / 2
    if options.json:
        told = {"ok": same, "workloads": lines, "fsync_us": fsync, "fsync_waits_for_disk": durable}
        print(json.dumps(told))
    else:
        print(f"{'':28} {'sandbox':>9} {'host':>9} {'ratio':>8} {'published':>10}")
        for line in lines:
            print(
                f"{line['what']:28} {line['sandbox_s']:7.2f} s {line['host_s']:7.2f} s"
                f" {line['ratio']:6.2f} x {line['published_s']:8.2f} s"
            )
        print(
            f"an fsync adds {fsync['sandbox']:.0f} µs in the sandbox, {fsync['host']:.0f} µs on the host"
        )
        if not durable:
            print("the sandbox's fsync does not wait for the disk: its time with FULL can't be compared")
    if not same:
        print("error: sandbox and host computed different things", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
