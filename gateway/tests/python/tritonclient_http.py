"""Unmodified tritonclient over HTTP."""

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import common

args = common.arguments()
client = triton.InferenceServerClient(args.url, concurrency=4, network_timeout=120)
metadata = client.get_model_metadata(args.model)


def inputs(binary=True, model=metadata, first=2, seed=1):
    tensors = []
    for spec in model["inputs"]:
        array = common.array(spec["shape"], spec["datatype"], first, seed)
        tensor = triton.InferInput(spec["name"], list(array.shape), spec["datatype"])
        tensor.set_data_from_numpy(array, binary_data=binary)
        tensors.append(tensor)
    return tensors


def outputs(binary):
    return [triton.InferRequestedOutput(spec["name"], binary_data=binary) for spec in metadata["outputs"]]


def arrays(result):
    return {spec["name"]: result.as_numpy(spec["name"]) for spec in metadata["outputs"]}


expected = arrays(client.infer(args.model, inputs()))


def health():
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(args.model)
    assert not client.is_model_ready("no-such-model")


def server_metadata():
    said = client.get_server_metadata()
    assert said["name"] == "millrace" and "binary_tensor_data" in said["extensions"]


def model_config_agrees_with_its_metadata():
    config = client.get_model_config(args.model)
    assert config["name"] == metadata["name"] and config["platform"] == metadata["platform"]
    assert config["max_batch_size"] == 0
    assert [t["dims"] for t in config["input"]] == [t["shape"] for t in metadata["inputs"]]
    assert [t["name"] for t in config["output"]] == [t["name"] for t in metadata["outputs"]]


def json_and_binary_agree_in_every_mix():
    for binary_in in (True, False):
        for binary_out in (True, False):
            result = client.infer(args.model, inputs(binary_in), outputs=outputs(binary_out))
            common.same(arrays(result), expected)
        common.same(arrays(client.infer(args.model, inputs(binary_in))), expected)


def compression():
    for request in (None, "gzip", "deflate"):
        for response in (None, "gzip", "deflate"):
            for binary in (True, False):
                result = client.infer(
                    args.model, inputs(binary), outputs=outputs(binary),
                    request_compression_algorithm=request, response_compression_algorithm=response,
                )
                common.same(arrays(result), expected)


def ids_and_parameters():
    result = client.infer(
        args.model, inputs(), request_id="my-id", priority=1, timeout=30_000_000,
        parameters={"anything": "goes"}, model_version=metadata["versions"][-1],
    )
    response = result.get_response()
    assert response["id"] == "my-id" and response["model_version"] == metadata["versions"][-1]


def asynchronous():
    calls = [client.async_infer(args.model, inputs()) for _ in range(20)]
    for call in calls:
        common.same(arrays(call.get_result()), expected)


def statistics_count():
    before = client.get_inference_statistics(args.model)["model_stats"][-1]
    client.infer(args.model, inputs())
    after = client.get_inference_statistics(args.model)["model_stats"][-1]
    assert after["inference_count"] == before["inference_count"] + 1
    assert any(stats["name"] == args.model for stats in client.get_inference_statistics()["model_stats"])


def unloads_and_loads():
    client.unload_model(args.model)
    assert not client.is_model_ready(args.model)
    index = client.get_model_repository_index()
    assert any(m["name"] == args.model and m["state"] == "UNAVAILABLE" for m in index), index
    error = common.raises(InferenceServerException, lambda: client.infer(args.model, inputs()), "load")
    assert error.status() == "503", error.status()
    client.load_model(args.model)
    assert client.is_model_ready(args.model)


def refusals():
    def status(call):
        return common.raises(InferenceServerException, call).status()

    good = inputs()
    assert status(lambda: client.infer("no-such-model", good)) == "404"
    assert status(lambda: client.infer(args.model, good, model_version="999")) == "404"
    assert status(lambda: client.infer(args.model, [])) == "400"
    unknown = [triton.InferRequestedOutput("no-such-output")]
    assert status(lambda: client.infer(args.model, good, outputs=unknown)) == "400"
    assert status(lambda: client.get_model_metadata("no-such-model")) == "404"
    assert status(client.get_trace_settings) == "404"


def large_tensors():
    model = client.get_model_metadata(args.large)
    spec = model["inputs"][0]
    rows = common.large_rows(spec["shape"], spec["datatype"])
    tensors = inputs(True, model, rows)
    result = client.infer(args.large, tensors)
    assert result.as_numpy(model["outputs"][0]["name"]).shape[0] == rows


checks = [
    health, server_metadata, model_config_agrees_with_its_metadata, json_and_binary_agree_in_every_mix,
    compression, ids_and_parameters, asynchronous, statistics_count, unloads_and_loads, refusals,
]
common.run(checks + ([large_tensors] if args.large else []))
