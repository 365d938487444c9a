"""Unmodified tritonclient against a function that keeps state: the counter of `millrace synth counter`."""

import queue

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

import common

args = common.arguments()
clients = [(grpc, grpc.InferenceServerClient(args.url)), (http, http.InferenceServerClient(args.url))]


class Counter:
    """What the function gives that is asked by nobody else."""

    def __init__(self):
        self.state = np.zeros([1, 4], np.float32)

    def next(self, x):
        self.state = self.state * np.float32(0.5) + x
        return self.state * np.float32(2)


def inputs(triton, x):
    tensor = triton.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(x)
    return [tensor]


def row(n):
    return np.full([1, 4], n, np.float32)


def state_is_nobody_elses_to_see():
    metadata = clients[0][1].get_model_metadata(args.model)
    assert [t.name for t in metadata.inputs] == ["x"] and [t.name for t in metadata.outputs] == ["y"]
    config = clients[0][1].get_model_config(args.model).config
    assert config.HasField("sequence_batching")
    assert config.sequence_batching.max_sequence_idle_microseconds == 60_000_000


def a_sequence_counts():
    for triton, client in clients:
        for sequence in (1001, "talk"):
            counter = Counter()
            for n in range(1, 6):
                result = client.infer(
                    args.model, inputs(triton, row(n)),
                    sequence_id=sequence, sequence_start=n == 1, sequence_end=n == 5,
                )
                np.testing.assert_array_equal(result.as_numpy("y"), counter.next(row(n)))


def refusals_say_what_to_do():
    for triton, client in clients:
        for id in ({}, {"sequence_id": 77}):
            common.raises(
                InferenceServerException, lambda: client.infer(args.model, inputs(triton, row(1)), **id),
                "sequence_start",
            )


def a_stream_keeps_the_order_of_its_sequences():
    client, done = clients[0][1], queue.Queue()
    client.start_stream(callback=lambda result, error: done.put((result, error)))
    for n in range(1, 41):
        for sequence in (2001, 2002):
            client.async_stream_infer(
                args.model, inputs(grpc, row(n + sequence)),
                sequence_id=sequence, sequence_start=n == 1, sequence_end=n == 40,
            )
    counters = {2001: Counter(), 2002: Counter()}
    for n in range(1, 41):
        for sequence, counter in counters.items():
            result, error = done.get(timeout=60)
            assert error is None, error
            np.testing.assert_array_equal(result.as_numpy("y"), counter.next(row(n + sequence)))
    client.stop_stream()


common.run([
    state_is_nobody_elses_to_see,
    a_sequence_counts,
    refusals_say_what_to_do,
    a_stream_keeps_the_order_of_its_sequences,
])
