"""Tries to reach what a sandbox must never reach, by every means of a root user. Prints a line for each
attempt that got through: silence is what is wanted. Arguments: addresses of the host, a TCP and a UDP
port that listen there, and names that a name server lies about."""

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys

config = json.loads(sys.argv[1])
hosts, tcp_port, udp_port, lies, api_port = (
    config["hosts"], config["tcp"], config["udp"], config["lies"], config["api"])
FORBIDDEN = hosts + [
    "10.0.0.1", "10.213.0.2", "10.213.0.3", "10.213.3.255", "127.0.0.2", "169.254.169.254", "168.63.129.16",
    "192.168.0.1", "172.16.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255"]
tried = 0


def attempt(what, work):
    """Whatever fails is as it should be."""
    global tried
    tried += 1
    try:
        answer = work()
    except OSError:
        return
    if answer:
        print("THROUGH", what, answer)


def tcp(host, port):
    connection = socket.create_connection((host, port), 1)
    # A turnstile may accept and then refuse: what counts is an answer.
    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = connection.recv(200)
    return answer if answer and b"403" not in answer and b"denied" not in answer else None


def udp(host, port):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    s.settimeout(0.3)
    s.sendto(b"knock", (host, port))
    return s.recv(200)


def ping(host):
    done = subprocess.run(["python3", "-c", f'''
import socket, struct, os
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
s.settimeout(0.3)
head = struct.pack("!BBHHH", 8, 0, 0, 7, 1)
total = sum(struct.unpack("!4H", head)); total = (total >> 16) + (total & 0xffff)
s.sendto(struct.pack("!BBHHH", 8, 0, ~total & 0xffff, 7, 1), ("{host}", 0))
answer, peer = s.recvfrom(500)
kind = answer[20]
print("answer" if kind == 0 else "")
'''], capture_output=True, text=True)
    return done.stdout.strip()


def spoofed(host, source):
    """A packet with a header of our own making."""
    s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    s.setsockopt(socket.IPPROTO_IP, socket.IP_HDRINCL, 1)
    payload = b"spoofed"
    udp_head = struct.pack("!HHHH", 4000, udp_port, 8 + len(payload), 0)
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28 + len(payload), 1, 0, 64, 17, 0,
                       socket.inet_aton(source), socket.inet_aton(host))
    s.sendto(head + udp_head + payload, (host, 0))


def frames():
    """Whatever is sent below IP: requests for neighbours, leases, and frames to everybody."""
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    s.bind(("eth0", 0))
    s.settimeout(0.5)
    ours = b"\x02\x74\x70\x00\x00\x02"
    for host in hosts + ["10.0.0.3", "10.213.0.3"]:
        arp = struct.pack("!HHBBH6s4s6s4s", 1, 0x0800, 6, 4, 1, ours, socket.inet_aton("10.0.0.2"),
                          b"\x00" * 6, socket.inet_aton(host))
        s.send(b"\xff" * 6 + ours + b"\x08\x06" + arp)
    discover = b"\x01\x01\x06\x00" + b"abcd" + b"\x00" * 20 + ours + b"\x00" * 202 + b"\x63\x82\x53\x63\x35\x01\x01\xff"
    dhcp = struct.pack("!HHHH", 68, 67, 8 + len(discover), 0) + discover
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(dhcp), 1, 0, 64, 17, 0, b"\x00" * 4, b"\xff" * 4)
    s.send(b"\xff" * 6 + ours + b"\x08\x00" + ip + dhcp)
    solicit = b"\x60" + b"\x00" * 3 + struct.pack("!HBB", 8, 58, 255) + b"\xfe\x80" + b"\x00" * 13 + b"\x02" \
        + b"\xff\x02" + b"\x00" * 13 + b"\x02" + b"\x85\x00\x00\x00\x00\x00\x00\x00"
    s.send(b"\x33\x33\x00\x00\x00\x02" + ours + b"\x86\xdd" + solicit)
    while True:
        frame = s.recv(2000)
        if frame[6:12] != ours and frame[12:14] in (b"\x08\x06", b"\x86\xdd") \
                or frame[12:14] == b"\x08\x00" and frame[23] == 17 and frame[36:38] == b"\x00\x44":
            return frame[:64]


for host in FORBIDDEN:
    for port in (80, tcp_port, api_port):
        attempt(f"tcp {host}:{port}", lambda: tcp(host, port))
    attempt(f"udp {host}", lambda: udp(host, udp_port))
    attempt(f"icmp {host}", lambda: ping(host))
for host in hosts:
    for source in ("10.0.0.2", "127.0.0.1", "10.213.0.3", "8.8.8.8", host):
        attempt(f"spoofed {source}", lambda: spoofed(host, source))
attempt("frames", frames)
for address in ("::1", "fe80::1%eth0", "::ffff:169.254.169.254", "fd00:ec2::254", "2001:db8::1"):
    attempt(f"ipv6 {address}", lambda: socket.create_connection((address, 80), 0.5).recv(1))
for name in lies:
    for port in (80, tcp_port):
        attempt(f"name {name}:{port}", lambda: tcp(name, port))
    attempt(f"redirect {name}", lambda: subprocess.run(
        ["curl", "-sL", "-m", "3", "-o", "/dev/null", "-w", "%{http_code}", f"http://api.test/to/{name}"],
        capture_output=True, text=True).stdout.strip().replace("000", "").replace("302", "").replace("403", ""))
attempt("redirect metadata", lambda: subprocess.run(
    ["curl", "-sL", "-m", "3", "-o", "/dev/null", "-w", "%{http_code}", "http://api.test/to/169.254.169.254"],
    capture_output=True, text=True).stdout.strip().replace("000", "").replace("302", "").replace("403", ""))
print("tried", tried)
