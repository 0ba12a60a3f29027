"""What the examples have in common: a stopwatch, and a table of our times next to published ones."""

import contextlib
import json
import statistics
import time

# What the makers of the package publish for their own service, in milliseconds.
PUBLISHED = {
    "create": 800,
    "resume": 400,
    "suspend": 200,
    "file write": 50,
    "file read": 50,
    "warm fork": 1000,
}


class Timings:
    """Milliseconds, by what took them."""

    def __init__(self, taken=None):
        self.taken = taken or {}

    @contextlib.contextmanager
    def measure(self, what):
        begun = time.perf_counter()
        yield
        self.add(what, (time.perf_counter() - begun) * 1000)

    def add(self, what, milliseconds):
        self.taken.setdefault(what, []).append(milliseconds)

    def merge(self, taken):
        for what, several in taken.items():
            self.taken.setdefault(what, []).extend(several)

    def rows(self):
        """What was measured and is published: median, published, how many times faster."""
        for what, published in PUBLISHED.items():
            if what in self.taken:
                ours = statistics.median(self.taken[what])
                yield {
                    "what": what,
                    "ours_ms": round(ours, 1),
                    "published_ms": published,
                    "ratio": round(published / ours, 2),
                    "samples": len(self.taken[what]),
                }

    def all_faster(self):
        return all(row["ratio"] > 1 for row in self.rows())

    def table(self):
        lines = [f"{'':12} {'ours':>10} {'published':>10} {'ratio':>8}"]
        for row in self.rows():
            mark = "" if row["ratio"] > 1 else "  slower"
            lines.append(
                f"{row['what']:12} {row['ours_ms']:7.1f} ms {row['published_ms']:7d} ms"
                f" {row['ratio']:6.1f} x{mark}"
            )
        return "\n".join(lines)


def report(told, timings, as_json):
    """Prints the outcome: one JSON object for machines, words and a table for people."""
    if as_json:
        print(json.dumps({**told, "timings": list(timings.rows())}))
    else:
        print()
        print(timings.table())
