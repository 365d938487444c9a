"""The KServe Python SDK, over REST and gRPC."""

import asyncio
import logging

import grpc
import httpx
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

import common

# The SDK logs each failure, and some are asked for here.
logging.getLogger("kserve").setLevel(logging.CRITICAL)
args = common.arguments()
base = f"http://{args.url}"


def described():
    said = httpx.get(f"{base}/v2/models/{args.model}").raise_for_status().json()
    return said["inputs"], said["outputs"]


declared, given = described()


def request(binary, seed=1):
    tensors = []
    for spec in declared:
        array = common.array(spec["shape"], spec["datatype"], seed=seed)
        tensor = InferInput(spec["name"], list(array.shape), spec["datatype"])
        tensor.set_data_from_numpy(array, binary_data=binary)
        tensors.append(tensor)
    outputs = [RequestedOutput(spec["name"], {"binary_data": binary}) for spec in given]
    return InferRequest(args.model, tensors, request_id="my-id", request_outputs=outputs)


def arrays(response):
    return {output.name: output.as_numpy() for output in response.outputs}


async def rest():
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(base)
    assert await client.is_server_ready(base)
    assert await client.is_model_ready(base, args.model)
    assert not await client.is_model_ready(base, "no-such-model")
    from_json = await client.infer(base, request(False), args.model)
    from_binary = await client.infer(base, request(True), args.model)
    assert from_json.id == "my-id" and from_json.model_name == args.model
    common.same(arrays(from_json), arrays(from_binary))
    try:
        await client.infer(base, request(False), "no-such-model")
    except httpx.HTTPStatusError as error:
        assert error.response.status_code == 404 and "no-such-model" in str(error), error
    else:
        raise AssertionError("an unknown model was served")
    await client.close()
    return arrays(from_binary)


async def over_grpc():
    async with InferenceGRPCClient(args.url) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready(args.model)
        raw = await client.infer(request(True))
        typed = await client.infer(request(False))
        assert raw.id == "my-id"
        common.same(arrays(raw), arrays(typed))
        unknown = request(True)
        unknown.model_name = "no-such-model"
        try:
            await client.infer(unknown)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.NOT_FOUND, error
        else:
            raise AssertionError("an unknown model was served")
        return arrays(raw)


def rest_client():
    asyncio.run(rest())


def grpc_client():
    asyncio.run(over_grpc())


def both_clients_agree():
    common.same(asyncio.run(rest()), asyncio.run(over_grpc()))


common.run([rest_client, grpc_client, both_clients_agree])
