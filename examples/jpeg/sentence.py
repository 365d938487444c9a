#!/usr/bin/env python3
"""The last step of the workflow: returns the classifier's result to the caller as a sentence."""

import millrace_function


def sentence(call):
    digit = call.input("label").data.cast("q")[0]
    likely = call.input("probabilities").data.cast("f")[digit]
    text = f"this is a {digit}, with {likely:.0%} certainty".encode()
    call.give("text", "UINT8", [len(text)], text, response=True)


if __name__ == "__main__":
    millrace_function.serve(sentence)
