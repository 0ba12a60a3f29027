"""Attempts on the kernel and through it: devices, mounts, settings, rare system calls, other namespaces."""

import array
import ctypes
import fcntl
import glob
import os
import socket
import stat
import struct
import time

from attempts import BOTH, CONFIG, GVISOR, MICROVM, Own, attempt, each, libc, syscall

FLAG = CONFIG["flag_path"]
HOST_RELEASE = CONFIG["host_release"]
O_PATH = 0o10000000


def reads(path):
    """Some bytes of a file or device, which are its own machine's."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    data = os.read(fd, 65536)
    os.close(fd)
    return Own(f"{len(data)} bytes of {path}") if data else None


def writes(path, text):
    """Puts another text in, and the old one back: what it reaches is seen from the host."""
    fd = os.open(path, os.O_RDWR)
    old = os.read(fd, 4096)
    os.pwrite(fd, text.encode(), 0)
    new = os.pread(fd, 4096, 0)
    os.pwrite(fd, old or b"\n", 0)
    os.close(fd)
    return Own(f"{path} was {old!r} and became {new!r}")


def node(kind, major, minor):
    """A device node of our own making, opened."""
    path = f"/tmp/node-{major}-{minor}"
    try:
        os.mknod(path, kind | 0o600, os.makedev(major, minor))
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        os.close(fd)
        return Own(f"device {major}:{minor}")
    finally:
        if os.path.lexists(path):
            os.unlink(path)


def holds_flag(root):
    """Whether the host's file is found below some directory."""
    with open(root + FLAG) as file:
        return file.read() or "an empty file"


@attempt("read physical memory")
def _():
    return each([lambda p=p: reads(p) for p in ("/dev/mem", "/dev/kmem", "/dev/port", "/dev/oldmem")]
                + [lambda: node(stat.S_IFCHR, 1, 1), lambda: node(stat.S_IFCHR, 1, 4)])


@attempt("read the host's kernel log", own=BOTH)
def _():
    buffer = ctypes.create_string_buffer(1 << 18)
    length = libc.klogctl(3, buffer, len(buffer))
    text = buffer.raw[:max(length, 0)]
    try:
        with open("/dev/kmsg", "rb") as log:
            os.set_blocking(log.fileno(), False)
            text += log.read(1 << 16) or b""
    except OSError:
        pass
    return text if HOST_RELEASE.encode() in text else Own(f"{len(text)} bytes of a kernel of its own")


@attempt("make nodes of the host's disks")
def _():
    return each(lambda a=a, b=b: node(stat.S_IFBLK, a, b)
                for a in (7, 8, 43, 65, 252, 253, 254, 259) for b in (0, 1))


@attempt("make nodes of cuse, kvm, vhost and vfio")
def _():
    return each(lambda b=b: node(stat.S_IFCHR, 10, b) for b in (196, 203, 232, 237, 238, 241))


@attempt("make nodes of tun and fuse", own=(GVISOR,))
def _():
    """gVisor has its own; a card made with it is in its own network."""
    return each([lambda: node(stat.S_IFCHR, 10, 200), lambda: node(stat.S_IFCHR, 10, 229)])


@attempt("open disks that are there")
def _():
    names = [p for kind in ("sd", "vd", "xvd", "nvme", "loop", "dm-", "nbd") for p in glob.glob(f"/dev/{kind}*")]
    return each(lambda p=p: reads(p) for p in names)


@attempt("press the host's magic keys", own=(MICROVM,))
def _():
    with open("/proc/sysrq-trigger", "w") as keys:
        keys.write("h")
    return Own("the help text of its own kernel")


@attempt("read /proc/kcore")
def _():
    return reads("/proc/kcore")


@attempt("have core dumps piped to a program", own=(MICROVM,))
def _():
    return writes("/proc/sys/kernel/core_pattern", "|/tmp/hostile-core")


@attempt("have the host's kernel run a helper", own=(MICROVM,))
def _():
    return each([lambda: writes("/proc/sys/kernel/modprobe", "/tmp/hostile-modprobe"),
                 lambda: writes("/proc/sys/kernel/hotplug", "/tmp/hostile-hotplug"),
                 lambda: writes("/sys/kernel/uevent_helper", "/tmp/hostile-uevent")])


def mounted(source, kind, flags=0, data=b""):
    where = f"/tmp/mnt-{kind}"
    os.makedirs(where, exist_ok=True)
    if libc.mount(source.encode(), where.encode(), kind.encode(), flags, data) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return where


def unmounted(where, work):
    try:
        return work(where)
    finally:
        libc.umount2(where.encode(), 2)


@attempt("be the release agent of a cgroup")
def _():
    def set_agent(where):
        with open(where + "/release_agent", "w") as file:
            file.write("/tmp/hostile-agent")
        return Own("an agent in its own hierarchy")
    return each(lambda data=data: unmounted(mounted("none", "cgroup", 0, data), set_agent)
                for data in (b"rdma", b"misc", b"none,name=hostile", b"memory"))


@attempt("mount shared directories of the host")
def _():
    return each(lambda k=k, d=d, s=s: unmounted(mounted(s, k, 0, d), os.listdir)
                for k, d in (("9p", b"trans=virtio"), ("virtiofs", b""), ("vboxsf", b""), ("nfs", b"addr=10.0.0.1"))
                for s in ("/", "host", "root", "kataShared", "hostshare"))


@attempt("mount disks and kernel filesystems")
def _():
    def look(where):
        return holds_flag(where) if os.path.exists(where + FLAG) else Own(f"{len(os.listdir(where))} names")
    return each(lambda s=s, k=k: unmounted(mounted(s, k, 1), look) for s, k in (
        ("proc", "proc"), ("sysfs", "sysfs"), ("none", "debugfs"), ("none", "tracefs"), ("none", "securityfs"),
        ("none", "cgroup2"), ("none", "devtmpfs"), ("/dev/vda", "ext4"), ("/dev/vda", "erofs"),
        ("/dev/sda1", "ext4"), ("/", "bind")))


@attempt("read a file of the host by its path")
def _():
    ways = ("", "/proc/1/root", "/proc/1/cwd", "/proc/self/root/../..", "/proc/self/cwd/../../../..", "/proc/self/fd/../../..",
            "/sys/../..", "/dev/../..", "/proc/1/task/1/root", "/.torpor/..", "/run/torpor/../..")
    return each(lambda w=w: holds_flag(w) for w in ways)


@attempt("open files by guessed handles")
def _():
    root = os.open("/", os.O_RDONLY)
    def guess(inode):
        handle = struct.pack("IiQ", 8, 1, inode) + b"\0" * 120
        fd = syscall(304, root, ctypes.c_char_p(handle), os.O_RDONLY)
        where = f"/proc/self/fd/{fd}"
        return holds_flag(where) if os.path.exists(where + FLAG) else Own(f"inode {inode}")
    return each(lambda i=i: guess(i) for i in (1, 2, 3, 32, 64, 128, 256))


@attempt("leave a chroot of its own", own=BOTH)
def _():
    os.makedirs("/tmp/jail/deeper", exist_ok=True)
    out = os.open("/", os.O_RDONLY)
    os.chroot("/tmp/jail/deeper")
    os.fchdir(out)
    for _ in range(100):
        os.chdir("..")
    os.chroot(".")
    return holds_flag("") if os.path.exists(FLAG) else Own("its own root")


@attempt("enter namespaces of others", own=BOTH)
def _():
    got = None
    for pid in (1, os.getppid()):
        for kind in ("mnt", "net", "pid", "ipc", "uts", "user", "cgroup"):
            try:
                fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
                syscall(308, fd, 0)
                got = Own(f"{kind} of its own machine")
            except OSError:
                pass
    return holds_flag("") if os.path.exists(FLAG) else got


@attempt("be root of a user namespace and mount there", own=BOTH)
def _():
    syscall(272, 0x10000000 | 0x20000)
    try:
        where = mounted("none", "tmpfs")
        mounted("proc", "proc")
        os.chroot(where)
    except OSError:
        pass
    return holds_flag("/proc/1/root") if os.path.exists("/proc/1/root" + FLAG) else Own("a namespace of its own")


@attempt("load a kernel module")
def _():
    garbage = b"\x7fELF" + os.urandom(4096)
    return each([lambda: Own(str(syscall(175, ctypes.c_char_p(garbage), len(garbage), ctypes.c_char_p(b"")))),
                 lambda: Own(str(syscall(313, os.open("/bin/sh", os.O_RDONLY), ctypes.c_char_p(b""), 0)))])


@attempt("start another kernel")
def _():
    return each([lambda: Own(f"kexec_load {syscall(246, 0, 0, None, 0)}"),
                 lambda: Own(f"kexec_file_load {syscall(320, -1, -1, 0, None, 4)}")])


@attempt("restart the host")
def _():
    return Own(f"reboot {syscall(169, 0xfee1dead, 672274793, 0x01234567, None)}")


@attempt("load a BPF program")
def _():
    table = struct.pack("IIII", 2, 4, 8, 1) + b"\0" * 104
    code = struct.pack("<BBhi", 0xb7, 0, 0, 0) + struct.pack("<BBhi", 0x95, 0, 0, 0)
    kept = ctypes.create_string_buffer(code)
    words = ctypes.create_string_buffer(b"GPL")
    program = struct.pack("IIQQIIQI", 1, 2, ctypes.addressof(kept), ctypes.addressof(words), 0, 0, 0, 0) + b"\0" * 80
    return each([lambda: Own(f"map {syscall(321, 0, ctypes.c_char_p(table), 72)}"),
                 lambda: Own(f"program {syscall(321, 5, ctypes.c_char_p(program), 72)}")])


@attempt("use io_uring", own=(MICROVM,))
def _():
    return Own(f"ring {syscall(425, 8, ctypes.create_string_buffer(120))}")


@attempt("use userfaultfd", own=(MICROVM,))
def _():
    return Own(f"descriptor {syscall(323, 0)}")


@attempt("take keys from the kernel's keyrings", own=BOTH)
def _():
    got = None
    for ring in (-1, -2, -3, -4, -5):
        try:
            serial = syscall(250, 0, ring, 1)
            buffer = ctypes.create_string_buffer(4096)
            length = syscall(250, 11, serial, buffer, 4096)
            got = Own(f"keyring {ring} of its own kernel with {length} bytes")
        except OSError:
            pass
    try:
        with open("/proc/keys") as keys:
            text = keys.read()
        return text if "torpor" in text else got or Own("a list without ours")
    except OSError:
        return got


@attempt("count events of the host's processor")
def _():
    about = struct.pack("IIQ", 0, 112, 0) + b"\0" * 96
    return each(lambda cpu=cpu, pid=pid: Own(f"counter {syscall(298, ctypes.c_char_p(about), pid, cpu, -1, 0)}")
                for pid, cpu in ((-1, 0), (0, -1), (1, -1)))


@attempt("use ports of the processor")
def _():
    return each([lambda: Own(f"iopl {syscall(172, 3)}"), lambda: Own(f"ioperm {syscall(173, 0x60, 5, 1)}")])


@attempt("connect to the host by vsock")
def _():
    def connect(cid, port):
        with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as s:
            s.settimeout(2)
            s.connect((cid, port))
            return f"cid {cid} port {port}"
    return each(lambda c=c, p=p: connect(c, p) for c in (0, 1, 2) for p in (1, 22, 1024, 8900, 9999))


@attempt("set the host's clock")
def _():
    now = time.time()
    time.clock_settime(time.CLOCK_REALTIME, now + 86400)
    moved = time.time() - now
    time.clock_settime(time.CLOCK_REALTIME, now)
    return Own(f"its own clock went {moved} seconds")


@attempt("outrank the host's processes", own=(GVISOR,))
def _():
    got = None
    for work in (lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99)), lambda: os.nice(-20)):
        try:
            work()
            got = Own("a rank among its own processes")
        except OSError:
            pass
    return got


@attempt("find paths and names of the host in /proc and /sys", own=BOTH)
def _():
    words = [word.encode() for word in CONFIG["words"]]
    names = ["/proc/self/mountinfo", "/proc/mounts", "/proc/1/mountinfo", "/proc/cmdline", "/proc/1/cmdline",
             "/proc/self/cgroup", "/proc/1/cgroup", "/proc/version", "/proc/swaps", "/proc/partitions",
             "/proc/sys/kernel/hostname", "/proc/net/unix", "/proc/net/arp", "/proc/net/route", "/etc/resolv.conf",
             "/etc/hosts", "/proc/filesystems", "/proc/sys/fs/binfmt_misc/status", "/proc/1/environ"]
    for top in ("/sys/class/dmi/id", "/sys/devices/virtual/dmi/id", "/sys/firmware/qemu_fw_cfg/by_name"):
        names += [os.path.join(d, f) for d, _, files in os.walk(top) for f in files]
    read = 0
    for name in names:
        try:
            with open(name, "rb") as file:
                os.set_blocking(file.fileno(), False)
                data = file.read(1 << 20) or b""
        except (OSError, ValueError):
            continue
        read += 1
        for word in words:
            if word in data:
                return f"{name} has {word.decode()}"
    return Own(f"{read} files without a word of the host")


@attempt("see processes of the host", own=BOTH)
def _():
    seen = 0
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                line = file.read()
        except OSError:
            continue
        seen += 1
        if any(word in line for word in (b"runsc", b"qemu-system", b"torpor\0serve", b"keeper\0")):
            return line
    return Own(f"{seen} of its own")


@attempt("type into a terminal that is not its own")
def _():
    def push(path):
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)
        fcntl.ioctl(fd, 0x5412, array.array("b", b"x"))
        return path
    return each(lambda p=p: push(p) for p in ["/dev/console", "/dev/tty0", "/dev/tty1", "/dev/ttyS0", "/dev/hvc0"])
