#!/usr/bin/env python3
"""Decodes concatenated PNG files of one size to pixels: UINT8 [frames, height, width, 3].

The PNGs must have red, green and blue of 8 bits each, and must not be interlaced. The function needs only
Python's standard library. Filters of rows are undone byte by byte, which takes a second for half a megapixel.
"""

import struct
import zlib

from millrace_function import Failed, serve

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOURS = 3
PIXEL_BYTES_MAX = 256 << 20


def chunks(data, at):
    """Yields the kind, the content and the end of each chunk of the file that begins at this byte."""
    while True:
        if at + 8 > len(data):
            raise Failed("a PNG is cut short")
        size, kind = struct.unpack_from(">I4s", data, at)
        if at + 12 + size > len(data):
            raise Failed("a PNG is cut short")
        yield kind, data[at + 8 : at + 8 + size], at + 12 + size
        if kind == b"IEND":
            return
        at += 12 + size


def picture(data, at):
    """Returns the height, the width, the rows and the end of the file that begins at this byte.

    Each row begins with the number of its filter.
    """
    if data[at : at + 8] != SIGNATURE:
        raise Failed(f"the file at byte {at} is not a PNG")
    header, packed = None, []
    for kind, content, end in chunks(data, at + 8):
        if kind == b"IHDR":
            header = struct.unpack(">IIBBBBB", content)
        elif kind == b"IDAT":
            packed.append(content)
    if header is None or header[2:4] != (8, 2) or header[6] != 0:
        raise Failed("a PNG does not have 8-bit red, green and blue, or is interlaced: convert it")
    width, height = header[:2]
    # For the decompressor a size of 0 means no limit.
    if width == 0 or height == 0:
        raise Failed(f"a PNG of {width}x{height} pixels is empty")
    size = height * (1 + COLOURS * width)
    if size > PIXEL_BYTES_MAX:
        raise Failed(f"a PNG of {width}x{height} pixels is too large")
    rows = zlib.decompressobj().decompress(b"".join(packed), size)
    if len(rows) != size:
        raise Failed("a PNG has too few pixels")
    return height, width, rows, end


def pixels(height, width, rows):
    """Returns the rows without their filters (PNG, section 9)."""
    stride, plain, above = COLOURS * width, bytearray(), bytearray(COLOURS * width)
    for at in range(0, height * (stride + 1), stride + 1):
        kind, row = rows[at], bytearray(rows[at + 1 : at + 1 + stride])
        if kind > 4:
            raise Failed(f"a PNG has a row with filter {kind}")
        if kind:
            for x in range(stride):
                left = row[x - COLOURS] if x >= COLOURS else 0
                corner = above[x - COLOURS] if x >= COLOURS else 0
                row[x] = (row[x] + guess(kind, left, above[x], corner)) & 255
        plain += row
        above = row
    return plain


def guess(kind, left, up, corner):
    if kind == 1:
        return left
    if kind == 2:
        return up
    if kind == 3:
        return (left + up) // 2
    near = left + up - corner
    return min((abs(near - left), 0, left), (abs(near - up), 1, up), (abs(near - corner), 2, corner))[2]


def decode(call):
    data = bytes(call.input("png").data)
    at, sizes, frames = 0, None, bytearray()
    while at < len(data) or sizes is None:
        height, width, rows, at = picture(data, at)
        if sizes not in (None, (height, width)):
            raise Failed("the PNGs have different sizes")
        sizes = (height, width)
        frames += pixels(height, width, rows)
        if len(frames) > PIXEL_BYTES_MAX:
            raise Failed("the PNGs have too many pixels together")
    count = len(frames) // (COLOURS * sizes[0] * sizes[1])
    call.give("pixels", "UINT8", [count, *sizes, COLOURS], frames)


if __name__ == "__main__":
    serve(decode)
