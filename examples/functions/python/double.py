#!/usr/bin/env python3
"""A function in Python. The output y is twice the input x, and the caller gets the sum of x."""

import array

import millrace_function


def double(call):
    x = call.input("x")
    values = x.data.cast("f")
    call.give("y", "FP32", x.shape, array.array("f", (2 * value for value in values)))
    call.give("sum", "FP32", [1], array.array("f", [sum(values)]), response=True)


if __name__ == "__main__":
    millrace_function.serve(double)
