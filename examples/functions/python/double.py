#!/usr/bin/env python3
"""A function in Python: y is twice x, and their sum goes to the caller.

The worker's environment says where the library is: FUNCTION_LIBRARY.
"""

import array
import ctypes
import os

millrace = ctypes.CDLL(os.environ.get("FUNCTION_LIBRARY", "libmillrace_function.so"))
ID_BYTES = 128


class Tensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("id", ctypes.c_char_p),
        ("datatype", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_size_t),
    ]


millrace.millrace_error.restype = ctypes.c_char_p
millrace.millrace_data.restype = ctypes.c_void_p
millrace.millrace_bytes.restype = ctypes.c_size_t
for name in ("data", "bytes", "release", "close", "finish"):
    getattr(millrace, "millrace_" + name).argtypes = [ctypes.c_void_p]


class Failed(Exception):
    pass


def check(code):
    if code < 0:
        raise Failed(millrace.millrace_error().decode())
    return code


def fetch(call, name):
    """An input's shape, and its data where it lies."""
    tensor, buffer = Tensor(), ctypes.c_void_p()
    check(millrace.millrace_input(call, name, ctypes.byref(tensor)))
    check(millrace.millrace_fetch(call, tensor.id, ctypes.byref(buffer)))
    return tensor.shape[: tensor.rank], view(buffer), buffer


def view(buffer):
    address, size = millrace.millrace_data(buffer), millrace.millrace_bytes(buffer)
    if not address:
        raise Failed(millrace.millrace_error().decode())
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def give(call, name, datatype, shape, data, response=False):
    """Stores data as an object of the worker, and says which output it is."""
    buffer, identity = ctypes.c_void_p(), ctypes.create_string_buffer(ID_BYTES)
    check(millrace.millrace_create(call, ctypes.c_size_t(len(data)), ctypes.byref(buffer)))
    view(buffer)[:] = data
    check(millrace.millrace_unique_id(call, identity))
    check(millrace.millrace_store(call, identity, buffer))
    millrace.millrace_release(buffer)
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    rank = ctypes.c_size_t(len(shape))
    check(millrace.millrace_output(call, name, identity, datatype, sizes, rank, int(response)))


def double(call):
    shape, data, buffer = fetch(call, b"x")
    x = data.cast("f")
    give(call, b"y", b"FP32", shape, array.array("f", (2 * value for value in x)).tobytes())
    give(call, b"sum", b"FP32", [1], array.array("f", [sum(x)]).tobytes(), response=True)
    millrace.millrace_release(buffer)


def main():
    session, call = ctypes.c_void_p(), ctypes.c_void_p()
    check(millrace.millrace_open(ctypes.byref(session)))
    while check(millrace.millrace_next(session, ctypes.byref(call))):
        try:
            double(call)
            millrace.millrace_finish(call)
        except Exception as error:
            millrace.millrace_fail(call, str(error).encode())
    millrace.millrace_close(session)


if __name__ == "__main__":
    main()
