"""Unmodified tritonclient over gRPC."""

import queue

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import common

args = common.arguments()
client = triton.InferenceServerClient(args.url)
metadata = client.get_model_metadata(args.model)


def inputs(model=metadata, first=2, seed=1):
    tensors = []
    for spec in model.inputs:
        array = common.array(spec.shape, spec.datatype, first, seed)
        tensor = triton.InferInput(spec.name, list(array.shape), spec.datatype)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def arrays(result, model=metadata):
    return {spec.name: result.as_numpy(spec.name) for spec in model.outputs}


expected = arrays(client.infer(args.model, inputs()))


def health():
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(args.model)
    assert client.is_model_ready(args.model, metadata.versions[-1])
    common.raises(InferenceServerException, lambda: client.is_model_ready("no-such-model"), "NOT_FOUND")


def server_metadata():
    said = client.get_server_metadata(as_json=True)
    assert said["name"] == "millrace" and said["version"]
    assert "binary_tensor_data" in said["extensions"]


def model_config_agrees_with_its_metadata():
    config = client.get_model_config(args.model).config
    assert config.name == metadata.name and config.platform == metadata.platform
    assert config.max_batch_size == 0
    assert [t.name for t in config.input] == [t.name for t in metadata.inputs]
    assert [list(t.dims) for t in config.output] == [list(t.shape) for t in metadata.outputs]


def outputs_have_their_declared_types():
    for spec in metadata.outputs:
        assert expected[spec.name].dtype == common.DTYPES[spec.datatype], spec


def requested_outputs_ids_and_parameters():
    names = [spec.name for spec in metadata.outputs]
    result = client.infer(
        args.model, inputs(), request_id="my-id", priority=1, timeout=30_000_000,
        outputs=[triton.InferRequestedOutput(names[-1])], parameters={"anything": "goes"},
        headers={"x-request-id": "from-python"}, model_version=metadata.versions[-1],
    )
    response = result.get_response()
    assert response.id == "my-id"
    assert response.model_version == metadata.versions[-1]
    assert [output.name for output in response.outputs] == [names[-1]]


def compression():
    for algorithm in ("gzip", "deflate"):
        common.same(arrays(client.infer(args.model, inputs(), compression_algorithm=algorithm)), expected)


def asynchronous():
    done = queue.Queue()
    for _ in range(20):
        client.async_infer(args.model, inputs(), callback=lambda result, error: done.put((result, error)))
    for _ in range(20):
        result, error = done.get(timeout=60)
        assert error is None, error
        common.same(arrays(result), expected)


def stream_in_order_and_alive_after_a_failure():
    done = queue.Queue()
    client.start_stream(callback=lambda result, error: done.put((result, error)))
    for i in range(50):
        client.async_stream_infer(args.model, inputs(), request_id=str(i))
    client.async_stream_infer("no-such-model", inputs(), request_id="bad")
    client.async_stream_infer(args.model, inputs(), request_id="after", enable_empty_final_response=True)
    for i in range(50):
        result, error = done.get(timeout=60)
        assert error is None, error
        assert result.get_response().id == str(i)
        common.same(arrays(result), expected)
    result, error = done.get(timeout=60)
    assert "no-such-model" in str(error), (result, error)
    result, error = done.get(timeout=60)
    assert error is None and result.get_response().id == "after"
    assert result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()


def typed_contents_are_answered_like_raw_ones():
    from tritonclient.grpc import service_pb2, service_pb2_grpc
    import grpc

    lists = {
        "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
        "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents",
        "UINT32": "uint_contents", "UINT64": "uint64_contents", "FP32": "fp32_contents",
        "FP64": "fp64_contents",
    }
    request = service_pb2.ModelInferRequest(model_name=args.model)
    for spec in metadata.inputs:
        array = common.array(spec.shape, spec.datatype)
        tensor = request.inputs.add(name=spec.name, datatype=spec.datatype, shape=array.shape)
        getattr(tensor.contents, lists[spec.datatype]).extend(array.flatten().tolist())
    with grpc.insecure_channel(args.url) as channel:
        response = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        array = np.frombuffer(raw, common.DTYPES[output.datatype]).reshape(output.shape)
        np.testing.assert_array_equal(array, expected[output.name])


def statistics_count():
    before = client.get_inference_statistics(args.model).model_stats[-1]
    client.infer(args.model, inputs())
    after = client.get_inference_statistics(args.model).model_stats[-1]
    assert after.inference_count == before.inference_count + 1
    assert after.inference_stats.success.ns > before.inference_stats.success.ns
    assert any(stats.name == args.model for stats in client.get_inference_statistics().model_stats)


def unloads_and_loads():
    client.unload_model(args.model)
    assert not client.is_model_ready(args.model)
    index = client.get_model_repository_index().models
    assert any(m.name == args.model and m.state == "UNAVAILABLE" for m in index), index
    common.raises(InferenceServerException, lambda: client.infer(args.model, inputs()), "UNAVAILABLE")
    client.load_model(args.model)
    assert client.is_model_ready(args.model)
    common.same(arrays(client.infer(args.model, inputs())), expected)


def refusals():
    good = inputs()
    common.raises(InferenceServerException, lambda: client.infer("no-such-model", good), "NOT_FOUND")
    common.raises(InferenceServerException, lambda: client.infer(args.model, good, "999"), "NOT_FOUND")
    common.raises(InferenceServerException, lambda: client.infer(args.model, []), "INVALID_ARGUMENT", "missing")
    unknown = [triton.InferRequestedOutput("no-such-output")]
    common.raises(
        InferenceServerException, lambda: client.infer(args.model, good, outputs=unknown), "no-such-output"
    )
    classes = [triton.InferRequestedOutput(metadata.outputs[0].name, class_count=2)]
    common.raises(InferenceServerException, lambda: client.infer(args.model, good, outputs=classes), "UNIMPLEMENTED")
    for call in (
        client.get_system_shared_memory_status, client.get_cuda_shared_memory_status,
        client.get_trace_settings, client.get_log_settings,
    ):
        common.raises(InferenceServerException, call, "UNIMPLEMENTED")


def large_tensors():
    model = client.get_model_metadata(args.large)
    rows = common.large_rows(model.inputs[0].shape, model.inputs[0].datatype)
    tensors = inputs(model, rows)
    result = client.infer(args.large, tensors)
    assert result.as_numpy(model.outputs[0].name).shape[0] == rows


checks = [
    health, server_metadata, model_config_agrees_with_its_metadata, outputs_have_their_declared_types,
    requested_outputs_ids_and_parameters, compression, asynchronous,
    stream_in_order_and_alive_after_a_failure, typed_contents_are_answered_like_raw_ones, statistics_count,
    unloads_and_loads, refusals,
]
common.run(checks + ([large_tensors] if args.large else []))
