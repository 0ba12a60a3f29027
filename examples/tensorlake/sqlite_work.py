"""What a database costs here: three workloads on SQLite, seconds each as one line of JSON.

Runs in a sandbox and on the host alike. Usage: sqlite_work.py DIRECTORY
"""

import json
import os
import pathlib
import random
import sqlite3
import statistics
import sys
import time

# Rows, how sure a commit is, and how many rows a commit has.
WORKLOADS = {
    "60k rows, WAL": (60_000, None, 60_000),
    "25k rows, synchronous=FULL": (25_000, "FULL", 500),
    "250k rows": (250_000, None, 250_000),
}
WORDS = ("alder", "birch", "cedar", "elder", "hazel", "larch", "maple", "rowan", "willow")


def rows(count):
    """The same rows everywhere."""
    chance = random.Random(42)
    for n in range(count):
        word = chance.choice(WORDS)
        yield f"{word}-{n}", chance.random() * 1000, chance.randrange(100), word * 4


def fill(base, count, per_commit):
    insert = "INSERT INTO things (name, value, kind, text) VALUES (?, ?, ?, ?)"
    several = []
    for row in rows(count):
        several.append(row)
        if len(several) == per_commit:
            with base:
                base.executemany(insert, several)
            several.clear()
    with base:
        base.executemany(insert, several)


def ask_and_change(base, count):
    """Ranges, patterns, updates, deletes, sums and a join, in proportion to the rows."""
    chance = random.Random(7)
    base.execute("CREATE INDEX things_by_value ON things (value)")
    for _ in range(count // 60):
        low = chance.random() * 990
        base.execute(
            "SELECT count(*) FROM things WHERE value BETWEEN ? AND ?", (low, low + 1)
        ).fetchone()
    for _ in range(50):
        pattern = f"%{chance.randrange(count)}%"
        base.execute("SELECT count(*) FROM things WHERE name LIKE ?", (pattern,)).fetchone()
    with base:
        for _ in range(count // 12):
            change = (chance.random(), chance.randrange(1, count))
            base.execute("UPDATE things SET value = ? WHERE id = ?", change)
        for _ in range(count // 30):
            base.execute("DELETE FROM things WHERE id = ?", (chance.randrange(1, count),))
    base.execute("SELECT kind, avg(value), min(value), max(value) FROM things GROUP BY kind").fetchall()
    join = "SELECT count(*) FROM things JOIN kinds ON kinds.id = things.kind WHERE kinds.id < 50"
    return base.execute(join).fetchone()[0]


def work(path, count, synchronous, per_commit):
    begun = time.perf_counter()
    base = sqlite3.connect(path)
    base.execute("PRAGMA journal_mode = WAL")
    if synchronous:
        base.execute(f"PRAGMA synchronous = {synchronous}")
    base.execute("CREATE TABLE things (id INTEGER PRIMARY KEY, name, value REAL, kind INTEGER, text)")
    base.execute("CREATE TABLE kinds (id INTEGER PRIMARY KEY, name)")
    with base:
        base.executemany("INSERT INTO kinds VALUES (?, ?)", ((n, f"kind {n}") for n in range(100)))
    fill(base, count, per_commit)
    answer = ask_and_change(base, count)
    base.close()
    return time.perf_counter() - begun, answer


def cost_of_sync(path):
    """Microseconds that an fsync adds to a write. Next to nothing means that it does not wait for a disk."""
    medians = []
    for sync in (False, True):
        taken = []
        with open(path, "wb", buffering=0) as file:
            for _ in range(200):
                begun = time.perf_counter()
                file.write(bytes(4096))
                if sync:
                    os.fsync(file.fileno())
                taken.append(time.perf_counter() - begun)
        medians.append(statistics.median(taken))
    os.unlink(path)
    return round((medians[1] - medians[0]) * 1e6, 1)


def main():
    directory = pathlib.Path(sys.argv[1])
    told = {"sqlite": sqlite3.sqlite_version, "seconds": {}, "answers": {}}
    for name, (count, synchronous, per_commit) in WORKLOADS.items():
        path = directory / "bench.db"
        seconds, answer = work(path, count, synchronous, per_commit)
        told["seconds"][name], told["answers"][name] = round(seconds, 3), answer
        for left in directory.glob("bench.db*"):
            os.unlink(left)
    told["fsync_us"] = cost_of_sync(directory / "sync")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
