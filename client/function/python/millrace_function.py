"""The module for a Python program that Millrace serves as a function (`runtime: process`).

A worker starts the program, and the program passes a function that answers calls to `serve`.
docs/guide/functions.md explains how to publish the program. PYTHONPATH must name the folder of this module,
and FUNCTION_LIBRARY the shared library of `millrace.h`.
"""

import ctypes
import os
import traceback

_ID_BYTES = 128


class Failed(Exception):
    """The error of this module, with the library's message. A function may raise it, or any other error."""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("id", ctypes.c_char_p),
        ("datatype", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_size_t),
    ]


def _load():
    library = ctypes.CDLL(os.environ.get("FUNCTION_LIBRARY", "libmillrace_function.so"))
    handle, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    place = ctypes.POINTER(handle)
    arguments = {
        "error": [],
        "open": [place],
        "close": [handle],
        "next": [handle, place],
        "input_count": [handle],
        "input_at": [handle, size, ctypes.POINTER(_Tensor)],
        "unique_id": [handle, text],
        "fetch": [handle, text, place],
        "create": [handle, size, place],
        "data": [handle],
        "bytes": [handle],
        "release": [handle],
        "store": [handle, text, handle],
        "output": [handle, text, text, text, ctypes.POINTER(ctypes.c_int64), size, ctypes.c_int],
        "finish": [handle],
        "fail": [handle, text],
    }
    for name, types in arguments.items():
        getattr(library, "millrace_" + name).argtypes = types
    library.millrace_error.restype = text
    library.millrace_data.restype = handle
    library.millrace_bytes.restype = library.millrace_input_count.restype = size
    for name in ("close", "release"):
        getattr(library, "millrace_" + name).restype = None
    return library


_library = _load()


def _check(code):
    if code < 0:
        raise Failed(_library.millrace_error().decode())
    return code


class _Buffer:
    """Memory of the library, released when nothing refers to it any longer."""

    def __init__(self, fill):
        self.handle = ctypes.c_void_p()
        _check(fill(ctypes.byref(self.handle)))

    def __del__(self):
        _library.millrace_release(self.handle)

    def view(self):
        address, size = _library.millrace_data(self.handle), _library.millrace_bytes(self.handle)
        if not address:
            raise Failed(_library.millrace_error().decode())
        array = (ctypes.c_ubyte * size).from_address(address)
        # A view keeps the memory alive.
        array.buffer = self
        return memoryview(array).cast("B")


class Input:
    """An input of a call: its name, the id of its data, its datatype and its shape."""

    def __init__(self, call, tensor):
        self._call = call
        self.name, self.id, self.datatype = (it.decode() for it in (tensor.name, tensor.id, tensor.datatype))
        self.shape = tensor.shape[: tensor.rank]

    @property
    def data(self):
        """The input's bytes, read-only and without a copy."""
        return self._call.fetch(self.id)


class Call:
    """A request, valid until the function that serves it returns."""

    def __init__(self, handle):
        self._handle = ctypes.c_void_p(handle.value)

    def inputs(self):
        """Returns all inputs, in the order in which they arrived."""
        tensors = [_Tensor() for _ in range(_library.millrace_input_count(self._handle))]
        for index, tensor in enumerate(tensors):
            _check(_library.millrace_input_at(self._handle, index, ctypes.byref(tensor)))
        return [Input(self, tensor) for tensor in tensors]

    def input(self, name):
        """Returns the input of that name."""
        for it in self.inputs():
            if it.name == name:
                return it
        raise Failed(f"there is no input {name!r}: use a name from the manifest's inputs")

    def fetch(self, id):
        """Returns the data of an id, read-only and without a copy. A reference keeps the data alive."""
        fetch = _library.millrace_fetch
        return _Buffer(lambda place: fetch(self._handle, id.encode(), place)).view().toreadonly()

    def store(self, data):
        """Makes data (bytes, or a buffer such as an array) an object of the worker, and returns its id."""
        data, identity = memoryview(data).cast("B"), ctypes.create_string_buffer(_ID_BYTES)
        create = _library.millrace_create
        buffer = _Buffer(lambda place: create(self._handle, len(data), place))
        buffer.view()[:] = data
        _check(_library.millrace_unique_id(self._handle, identity))
        _check(_library.millrace_store(self._handle, identity, buffer.handle))
        return identity.value.decode()

    def output(self, name, id, datatype, shape, response=False):
        """Sets an output to the data of an id. A response is for the caller of the workflow: its bytes are
        in the answer. Any other output passes to its next consumer."""
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        words = [it.encode() for it in (name, id, datatype)]
        _check(_library.millrace_output(self._handle, *words, sizes, len(shape), int(response)))

    def give(self, name, datatype, shape, data, response=False):
        """Stores data and sets an output to it."""
        self.output(name, self.store(data), datatype, shape, response)

    def _answer(self, end, *words):
        handle, self._handle = self._handle, None
        # If the answer cannot be sent, the worker is gone, and the wait for the next call reports it.
        end(handle, *words)


def serve(function):
    """Passes each Call to a function, until the worker needs the process no longer. An exception of the
    function fails the request. Unless it is Failed, its traceback is in the worker's log too."""
    session, handle = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_library.millrace_open(ctypes.byref(session)))
    try:
        while _check(_library.millrace_next(session, ctypes.byref(handle))):
            call = Call(handle)
            try:
                function(call)
            except Failed as failed:
                call._answer(_library.millrace_fail, str(failed).encode())
            except Exception as error:
                traceback.print_exc()
                call._answer(_library.millrace_fail, f"{type(error).__name__}: {error}".encode())
            else:
                call._answer(_library.millrace_finish)
    finally:
        _library.millrace_close(session)
