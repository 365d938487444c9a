"""The model of Triton's Python backend: onnxruntime with one thread, as in each peer of this comparison."""

import os
import sys

# Triton's stub replaces the module path, so the packages must be added again.
sys.path.insert(0, os.environ["PEER_PACKAGES"])

import numpy
import onnxruntime
import triton_python_backend_utils as backend


class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        path = os.path.join(os.environ["PEER_MODELS"], args["model_name"] + ".onnx")
        self.session = onnxruntime.InferenceSession(path, options)

    def execute(self, requests):
        inputs = [backend.get_input_tensor_by_name(r, "x").as_numpy() for r in requests]
        rows = self.session.run(None, {"x": numpy.concatenate(inputs)})[0]
        responses, start = [], 0
        for part in inputs:
            end = start + len(part)
            responses.append(backend.InferenceResponse([backend.Tensor("y", rows[start:end])]))
            start = end
        return responses
