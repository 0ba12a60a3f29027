"""Attempts to reach what a sandbox must never reach: the host, its neighbours, private places. The argument has
addresses of the host, a TCP and a UDP port that listen there, and names that a name server lies about."""

import shutil
import socket
import struct
import subprocess

from attempts import BOTH, CONFIG, Own, attempt, each

HOSTS, TCP, UDP, API = CONFIG["hosts"], CONFIG["tcp"], CONFIG["udp"], CONFIG["api"]
LIES = CONFIG["lies"]
NEIGHBOURS = ["10.213.0.2", "10.213.0.3", "10.213.3.255", "10.0.0.3"]
GATEWAY = "10.0.0.1"
METADATA = ["169.254.169.254", "168.63.129.16", "100.100.100.200"]
PRIVATE = ["192.168.0.1", "172.16.0.1", "100.64.0.1", "10.255.255.254", "198.18.0.1"]
ODD = ["127.0.0.2", "0.0.0.0", "224.0.0.1", "255.255.255.255"]
OURS = b"\x02\x74\x70\x00\x00\x02"


def tcp(host, port):
    with socket.create_connection((host, port), 1) as connection:
        # An egress proxy may accept and then refuse: what counts is an answer.
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = connection.recv(200)
    return answer if answer and b"403" not in answer and b"denied" not in answer else None


def connects(hosts):
    return each(lambda h=h, p=p: tcp(h, p) for h in hosts for p in (80, TCP, API))


def udp(host, port, payload=b"knock"):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        s.settimeout(0.3)
        s.sendto(payload, (host, port))
        return s.recv(200)


def ping(host):
    s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    s.settimeout(0.3)
    head = struct.pack("!BBHHH", 8, 0, 0, 7, 1)
    total = sum(struct.unpack("!4H", head))
    total = (total >> 16) + (total & 0xffff)
    s.sendto(struct.pack("!BBHHH", 8, 0, ~total & 0xffff, 7, 1), (host, 0))
    answer, _ = s.recvfrom(500)
    return answer if answer[20] == 0 else None


def spoofed(host, source):
    """A packet with a header of our own making; the host's service tells if it came."""
    s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    s.setsockopt(socket.IPPROTO_IP, socket.IP_HDRINCL, 1)
    payload = b"spoofed"
    udp_head = struct.pack("!HHHH", 4000, UDP, 8 + len(payload), 0)
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28 + len(payload), 1, 0, 64, 17, 0,
                       socket.inet_aton(source), socket.inet_aton(host))
    s.sendto(head + udp_head + payload, (host, 0))


def frames(packets, answers):
    """Sends below IP, and looks for an answer."""
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    s.bind(("eth0", 0))
    s.settimeout(0.5)
    for packet in packets:
        s.send(packet)
    while True:
        frame = s.recv(2000)
        if frame[6:12] != OURS and answers(frame):
            return frame[:64]


def fetch(url):
    """The status of a page, unless it is a refusal or nothing at all."""
    if shutil.which("curl") is None:
        raise RuntimeError("curl is missing")
    done = subprocess.run(["curl", "-sL", "-m", "3", "-o", "/dev/null", "-w", "%{http_code}", url],
                          capture_output=True, text=True)
    return None if done.stdout.strip() in ("000", "302", "403") else f"{url}: {done.stdout}"


@attempt("connect to services of the host")
def _():
    return connects(HOSTS)


@attempt("connect to the host by its gateway")
def _():
    return connects([GATEWAY])


@attempt("connect to neighbours")
def _():
    return connects(NEIGHBOURS)


@attempt("connect to the metadata service of a cloud")
def _():
    return connects(METADATA)


@attempt("connect to private networks")
def _():
    return connects(PRIVATE)


@attempt("connect to odd addresses of the host")
def _():
    return connects(ODD)


@attempt("send datagrams to the host")
def _():
    return each(lambda h=h: udp(h, UDP) for h in HOSTS + [GATEWAY] + NEIGHBOURS + METADATA + ODD)


@attempt("ping the host")
def _():
    return each(lambda h=h: ping(h) for h in HOSTS + NEIGHBOURS[:2] + METADATA[:1])


@attempt("send with a forged source address")
def _():
    return each(lambda h=h, s=s: spoofed(h, s)
                for h in HOSTS for s in ("10.0.0.2", "127.0.0.1", "10.213.0.3", "8.8.8.8", h))


@attempt("find neighbours by ARP")
def _():
    ask = [b"\xff" * 6 + OURS + b"\x08\x06" + struct.pack(
        "!HHBBH6s4s6s4s", 1, 0x0800, 6, 4, 1, OURS, socket.inet_aton("10.0.0.2"), b"\x00" * 6, socket.inet_aton(host))
        for host in HOSTS + ["10.0.0.3", "10.213.0.3"]]
    return frames(ask, lambda frame: frame[12:14] == b"\x08\x06")


@attempt("poison a neighbour's ARP")
def _():
    lie = b"\xff" * 6 + OURS + b"\x08\x06" + struct.pack(
        "!HHBBH6s4s6s4s", 1, 0x0800, 6, 4, 2, OURS, socket.inet_aton("10.0.0.1"), b"\xff" * 6,
        socket.inet_aton("10.0.0.2"))
    mine = socket.inet_aton("10.0.0.2")
    return frames([lie] * 3, lambda frame: frame[12:14] == b"\x08\x00" and frame[30:34] != mine)


@attempt("get a lease by DHCP")
def _():
    discover = b"\x01\x01\x06\x00" + b"abcd" + b"\x00" * 20 + OURS + b"\x00" * 202 + b"\x63\x82\x53\x63\x35\x01\x01\xff"
    dhcp = struct.pack("!HHHH", 68, 67, 8 + len(discover), 0) + discover
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(dhcp), 1, 0, 64, 17, 0, b"\x00" * 4, b"\xff" * 4)
    return frames([b"\xff" * 6 + OURS + b"\x08\x00" + ip + dhcp],
                  lambda f: f[12:14] == b"\x08\x00" and f[23] == 17 and f[36:38] == b"\x00\x44")


@attempt("solicit an IPv6 router")
def _():
    solicit = b"\x60" + b"\x00" * 3 + struct.pack("!HBB", 8, 58, 255) + b"\xfe\x80" + b"\x00" * 13 + b"\x02" \
        + b"\xff\x02" + b"\x00" * 13 + b"\x02" + b"\x85\x00\x00\x00\x00\x00\x00\x00"
    return frames([b"\x33\x33\x00\x00\x00\x02" + OURS + b"\x86\xdd" + solicit], lambda f: f[12:14] == b"\x86\xdd")


@attempt("send frames with a VLAN tag")
def _():
    inner = b"\x08\x06" + b"\x00" * 28
    return frames([b"\xff" * 6 + OURS + b"\x81\x00" + struct.pack("!H", n) + inner for n in (0, 1, 100)],
                  lambda frame: frame[12:14] == b"\x81\x00")


@attempt("connect by IPv6")
def _():
    def connect(address):
        with socket.create_connection((address, API), 0.5) as s:
            s.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            return s.recv(100) or None
    return each(lambda a=a: connect(a) for a in (
        "::1", "fe80::1%eth0", "::ffff:169.254.169.254", "fd00:ec2::254", "2001:db8::1", f"::ffff:{HOSTS[0]}",
        f"64:ff9b::{HOSTS[0]}"))


@attempt("follow names that lead to private places")
def _():
    return each(lambda n=n, p=p: tcp(n, p) for n in LIES for p in (80, TCP))


@attempt("follow redirects to private places")
def _():
    return each(lambda n=n: fetch(f"http://api.test/to/{n}") for n in LIES + ["169.254.169.254"])


@attempt("ask a name server of its own choice for a private name")
def _():
    question = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04host\x05local\x00\x00\x01\x00\x01"
    return each(lambda h=h: udp(h, 53, question) for h in HOSTS + ["127.0.0.53", "169.254.169.253"])


@attempt("listen where others may come", own=BOTH)
def _():
    with socket.create_server(("0.0.0.0", 8900), backlog=4) as server:
        server.settimeout(1)
        try:
            connection, peer = server.accept()
        except OSError:
            return Own("a port that nobody came to")
        connection.close()
        return f"{peer} came"


def told(kind, payload):
    """A wish to the kernel's network; the error of its answer, 0 if it obeyed."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as s:
        s.settimeout(2)
        s.sendto(struct.pack("IHHII", 16 + len(payload), kind, 0x505, 1, 0) + payload, (0, 0))
        answer = s.recv(4096)
    return struct.unpack("i", answer[16:20])[0]


def attribute(kind, value):
    return struct.pack("HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


@attempt("change its address and routes", own=BOTH)
def _():
    """The card may obey; nothing is reached by it. On a network that is its own, whatever it says."""
    card = socket.if_nametoindex("eth0")
    obeyed = 0
    for address in ("10.0.0.3", "10.213.0.3", HOSTS[0]):
        raw = socket.inet_aton(address)
        about = struct.pack("BBBBI", socket.AF_INET, 32, 0, 0, card)
        obeyed += told(20, about + attribute(2, raw) + attribute(1, raw)) == 0
    for network in ("169.254.0.0", "10.213.0.0"):
        about = struct.pack("BBBBBBBBI", socket.AF_INET, 16, 0, 0, 254, 4, 253, 1, 0)
        obeyed += told(24, about + attribute(1, socket.inet_aton(network)) + attribute(4, struct.pack("I", card))) == 0
    link = struct.pack("BBHiII", 0, 0, 0, card, 0, 0)
    obeyed += told(19, link + attribute(1, b"\x02\x74\x70\x00\x00\x03")) == 0
    got = connects(NEIGHBOURS[:2] + METADATA[:1]) or each(lambda h=h: udp(h, UDP) for h in NEIGHBOURS[:2])
    return got or (Own(f"{obeyed} wishes were granted, and led nowhere") if obeyed else None)
