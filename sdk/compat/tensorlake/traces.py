"""What an installation has on the host. After the last sandbox is gone and the daemon stopped: nothing."""

import dataclasses
import pathlib
import subprocess


@dataclasses.dataclass
class Traces:
    processes: list
    mounts: list
    cgroups: list
    links: list
    namespaces: list
    tables: list
    loops: list

    @classmethod
    def find(cls, tag, directory):
        """Of the installation with this tag, whose files are below `directory`."""

        def ours(line):
            return tag in line or str(directory) in line

        return cls(
            processes=[line for line in processes() if ours(line)],
            mounts=lines(pathlib.Path("/proc/self/mountinfo").read_text(), ours),
            cgroups=cgroups(tag),
            # Names of links are short, so they have the beginning of the tag only.
            links=lines(output("ip", "-br", "link"), lambda line: tag[:6] in line),
            namespaces=lines(output("ip", "netns", "list"), ours),
            tables=lines(output("nft", "list", "tables"), ours),
            loops=lines(output("losetup", "-l", "-n", "-O", "NAME,BACK-FILE"), ours),
        )

    def __bool__(self):
        return any(getattr(self, field.name) for field in dataclasses.fields(self))


def lines(text, ours):
    return [line for line in text.splitlines() if ours(line)]


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def processes():
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue  # It ended meanwhile.
            yield f"{entry.name} {command.decode(errors='replace')}"


def cgroups(tag):
    top = pathlib.Path("/sys/fs/cgroup")
    roots = [top, *(path for path in top.iterdir() if path.is_dir())]
    groups = (root / "torpor" / tag for root in roots)
    return [str(path) for group in groups if group.is_dir() for path in group.iterdir() if path.is_dir()]
