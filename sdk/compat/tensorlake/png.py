"""Reads a PNG of 8 bits per channel, as far as the tests need it."""

import struct
import zlib

CHANNELS = {2: 3, 6: 4}


def read(data):
    """Width, height, and rows of points; a point is (red, green, blue)."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n", data[:8]
    width = height = channels = None
    packed, place = b"", 8
    while place < len(data):
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        chunk = data[place + 8 : place + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colours = struct.unpack(">IIBB", chunk[:10])
            assert depth == 8, depth
            channels = CHANNELS[colours]
        elif kind == b"IDAT":
            packed += chunk
        place += length + 12
    return width, height, points(zlib.decompress(packed), width, height, channels)


def points(raw, width, height, channels):
    rows, above, step = [], bytes(width * channels), width * channels + 1
    for y in range(height):
        line = raw[y * step : (y + 1) * step]
        above = unfiltered(line[0], line[1:], above, channels)
        rows.append([tuple(above[x * channels : x * channels + 3]) for x in range(width)])
    return rows


def unfiltered(kind, line, above, channels):
    out = bytearray()
    for n, value in enumerate(line):
        left = out[n - channels] if n >= channels else 0
        corner = above[n - channels] if n >= channels else 0
        guess = (0, left, above[n], (left + above[n]) // 2, paeth(left, above[n], corner))[kind]
        out.append((value + guess) & 0xFF)
    return bytes(out)


def paeth(left, above, corner):
    guess = left + above - corner
    return min((left, above, corner), key=lambda value: abs(guess - value))
