"""What the protocol checks share: arguments, inputs for any model, and a tally of checks.

The checks know nothing of the server but its address and a model's name, so they run against the
echo server of the Rust tests and against a whole Millrace alike.
"""

import argparse
import sys
import traceback

import numpy as np

DTYPES = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("url", help="host:port")
    parser.add_argument("--model", required=True, help="a model to use; it is unloaded and loaded again")
    parser.add_argument("--large", help="a model whose first dimension alone is free: gets more than 64 MiB")
    return parser.parse_args()


def array(shape, datatype, first=2, seed=1):
    """Random elements of a declared shape, whose free dimensions become `first`."""
    shape = [first if int(dim) < 0 else int(dim) for dim in shape]
    random = np.random.default_rng(seed)
    dtype = DTYPES[datatype]
    if datatype.startswith("FP"):
        return random.standard_normal(shape).astype(dtype)
    return random.integers(0, 2, shape).astype(dtype)


def large_rows(shape, datatype, size=64 << 20):
    """How large a free dimension must be for the tensor to have `size` bytes."""
    row = np.dtype(DTYPES[datatype]).itemsize
    for dim in shape:
        row *= max(1, int(dim))
    return size // row + 1


def same(left, right):
    """The same outputs, to the bit."""
    assert left.keys() == right.keys(), (left.keys(), right.keys())
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def raises(expected, call, *says):
    """The call fails as expected, and its message says these words."""
    try:
        call()
    except expected as error:
        for word in says:
            assert word in str(error), f"{error!r} does not say {word!r}"
        return error
    raise AssertionError("it did not fail")


def run(checks):
    """Runs every check; exits with 1 when one fails."""
    failed = 0
    for check in checks:
        try:
            check()
            print(f"ok      {check.__name__}")
        except Exception:  # noqa: BLE001 - every failure is reported, whatever it is
            failed += 1
            print(f"FAILED  {check.__name__}")
            traceback.print_exc(file=sys.stdout)
    print(f"{len(checks) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)
