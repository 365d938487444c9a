"""The model of MLServer: onnxruntime with one thread, as in each peer of this comparison."""

import os

import numpy
import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class OnnxModel(MLModel):
    async def load(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        path = os.path.join(os.environ["PEER_MODELS"], self.name + ".onnx")
        self.session = onnxruntime.InferenceSession(path, options)
        return True

    async def predict(self, payload):
        rows = NumpyCodec.decode_input(payload.inputs[0]).astype(numpy.float32, copy=False)
        answer = self.session.run(None, {"x": rows})[0]
        return InferenceResponse(
            model_name=self.name, id=payload.id, outputs=[NumpyCodec.encode_output("y", answer)]
        )
