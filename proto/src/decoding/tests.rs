use proptest::prelude::*;
use prost::encoding::encode_varint;

use super::*;
use crate::admin;
use crate::inference::infer_parameter::ParameterChoice;
use crate::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use crate::inference::{InferParameter, InferTensorContents, ModelInferRequest};
use crate::worker::{self, InferTensor, InvokeRequest, TensorPart, tensor_part};

fn kind<M: Name>() -> MessageType {
    MessageType::named(&M::full_name()).unwrap()
}

/// Walks over `message` in pieces of `piece` bytes. Returns the memory of the decoded form.
fn walk<M: Name>(message: &[u8], piece: usize, limits: WalkLimits) -> Result<u64, DecodeRefusal> {
    let mut walk = MessageWalk::new(kind::<M>(), Some(message.len() as u64), limits);
    for piece in message.chunks(piece) {
        walk.push(piece)?;
    }
    let decoded = walk.decoded_bytes();
    walk.finish().map(|()| decoded)
}

fn refusal<M: Name>(message: &[u8], limits: WalkLimits) -> DecodeRefusal {
    walk::<M>(message, 1 << 16, limits).unwrap_err()
}

/// Encodes a length-delimited field.
fn field(number: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_varint(number << 3 | 2, &mut bytes);
    encode_varint(payload.len() as u64, &mut bytes);
    bytes.extend(payload);
    bytes
}

#[test]
fn shapes_are_no_smaller_than_the_structs() {
    fn check<M: Name>() {
        let shape = kind::<M>().shape().bytes;
        let real = size_of::<M>() as u64;
        assert!((real..=3 * real).contains(&shape), "{}: {shape} for {real}", M::full_name());
    }
    check::<ModelInferRequest>();
    check::<InferInputTensor>();
    check::<InferRequestedOutputTensor>();
    check::<InferTensorContents>();
    check::<InferParameter>();
    check::<InvokeRequest>();
    check::<InferTensor>();
    check::<TensorPart>();
    check::<worker::DesiredFunction>();
    check::<worker::GpuTelemetry>();
    check::<worker::FunctionStatus>();
    check::<admin::Function>();
    check::<crate::executor::Command>();
    check::<crate::raft::Message>();
}

#[test]
fn no_message_type_contains_itself() {
    fn depth(kind: MessageType, above: &mut Vec<MessageType>) -> usize {
        assert!(!above.contains(&kind), "a type within itself: its struct is boxed, and nesting unbounded");
        above.push(kind);
        let children = kind.shape().fields.iter().filter_map(|(_, field)| match field {
            FieldShape::Message { kind, .. } => Some(*kind),
            _ => None,
        });
        let deepest = children.map(|child| depth(child, above)).max().unwrap_or(0);
        above.pop();
        deepest + 1
    }
    // The types of descriptors contain themselves, but no service uses them.
    for (name, kind) in SCHEMA.types.iter().filter(|(name, _)| !name.starts_with("google.protobuf.")) {
        assert!(depth(*kind, &mut Vec::new()) < NESTING_MAX, "{name}");
    }
}

#[test]
fn every_waiting_method_has_a_request_type() {
    let infer = MessageType::of_requests("/inference.GRPCInferenceService/ModelInfer");
    assert_eq!(infer, Some(kind::<ModelInferRequest>()));
    let invoke = MessageType::of_requests("/millrace.worker.v1.Worker/Invoke");
    assert_eq!(invoke, Some(kind::<InvokeRequest>()));
    assert_eq!(MessageType::of_requests("/grpc.health.v1.Health/Check"), None);
    for path in crate::WAITING_METHODS {
        assert!(MessageType::of_requests(path).is_some(), "{path}");
    }
}

#[test]
fn tensors_without_fields_are_refused_by_their_number() {
    let tensors = [0x2a, 0].repeat(1 << 20);
    let max = WalkLimits::CLIENT.elements_max;
    assert_eq!(
        refusal::<ModelInferRequest>(&tensors, WalkLimits::CLIENT),
        DecodeRefusal::TooManyElements { max }
    );
    assert!(walk::<ModelInferRequest>(&tensors[..2 * max as usize], 999, WalkLimits::CLIENT).is_ok());
    // Peers may send more tensors, but the memory of the decoded form is bounded all the same.
    let refused = refusal::<ModelInferRequest>(&tensors, WalkLimits::PEER);
    assert!(matches!(refused, DecodeRefusal::TooLarge { .. }), "{refused}");
    assert!(decode::<ModelInferRequest>(tensors.into(), WalkLimits::PEER).is_err());
}

#[test]
fn messages_over_the_limits_of_fields_and_text_are_refused() {
    let limits = WalkLimits::CLIENT;
    let strings = field(5, &field(5, &[0x42, 0].repeat(70_000)));
    assert_eq!(
        refusal::<ModelInferRequest>(&strings, limits),
        DecodeRefusal::TooManyFields { max: limits.fields_max }
    );
    let refused = refusal::<ModelInferRequest>(&field(5, &[0x22, 0].repeat(1 << 20)), WalkLimits::PEER);
    assert!(matches!(refused, DecodeRefusal::TooLarge { .. }), "{refused}");
    for text in
        [field(1, &vec![b'x'; 2 << 20]), field(5, &field(3, &vec![1; 2 << 20])), field(99, &vec![0; 2 << 20])]
    {
        assert_eq!(
            refusal::<ModelInferRequest>(&text, limits),
            DecodeRefusal::TooMuchText { max: limits.text_bytes_max }
        );
    }
}

#[test]
fn large_contents_are_accepted_unless_decoding_multiplies_them() {
    let limits = WalkLimits::CLIENT;
    let request = |contents: InferTensorContents| ModelInferRequest {
        inputs: vec![InferInputTensor { contents: Some(contents), ..InferInputTensor::default() }],
        ..ModelInferRequest::default()
    };
    let floats = request(InferTensorContents { fp32_contents: vec![1.0; 4 << 20], ..Default::default() });
    let flags = request(InferTensorContents { bool_contents: vec![true; 16 << 20], ..Default::default() });
    let raw = ModelInferRequest {
        raw_input_contents: vec![Bytes::from(vec![0; 16 << 20]); 2],
        ..ModelInferRequest::default()
    };
    for (request, contents) in [(floats, 16 << 20), (flags, 16 << 20), (raw, 0)] {
        let message = request.encode_to_vec();
        let decoded = walk::<ModelInferRequest>(&message, 1 << 20, limits).unwrap();
        assert!((contents..contents + 4096).contains(&decoded), "{decoded}");
    }
    // A byte on the wire becomes eight in memory.
    let small = request(InferTensorContents { int64_contents: vec![1; 1 << 20], ..Default::default() });
    let decoded = walk::<ModelInferRequest>(&small.encode_to_vec(), 1 << 20, limits).unwrap();
    assert!((8 << 20..(8 << 20) + 4096).contains(&decoded), "{decoded}");
    let large = request(InferTensorContents { int64_contents: vec![1; 4 << 20], ..Default::default() });
    let refused = refusal::<ModelInferRequest>(&large.encode_to_vec(), limits);
    assert!(matches!(refused, DecodeRefusal::TooLarge { .. }), "{refused}");
    // The same list, unpacked: each number has a tag of its own.
    let unpacked = field(5, &field(5, &[0x18, 1].repeat(4 << 20)));
    let max = WalkLimits::PEER.fields_max;
    assert_eq!(
        refusal::<ModelInferRequest>(&unpacked, WalkLimits::PEER),
        DecodeRefusal::TooManyFields { max }
    );
}

/// prost decodes an entry of a map with any wire type as a message. A walk that took the wire type
/// seriously would not count the entry.
#[test]
fn entries_of_maps_with_the_wire_type_of_a_number_are_refused() {
    for tag in [0x20, 0x21, 0x25] {
        let message = field(5, &[tag, 3, 0x0a, 1, b'a', 0x40, 0, 0x40, 0, 0x40, 0, 0x40, 0]);
        for piece in [1, 64] {
            let refused = walk::<ModelInferRequest>(&message, piece, WalkLimits::CLIENT).unwrap_err();
            assert_eq!(refused, DecodeRefusal::Malformed(UNLENGTHED), "tag {tag:#x}");
        }
    }
}

#[test]
fn malformed_messages_are_refused() {
    for bytes in [
        &[0x2a][..],
        &[0x2a, 1],
        &[0x2a, 2, 0x0a, 5],
        &[0x2a, 1, 0x0a, 0],
        &[0x0b],
        &[0x00, 1],
        &[0x07],
        &[0x09, 1, 2],
        &[0x08, 0x80],
        &[0xff; 11],
        &[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
        &[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2],
    ] {
        for piece in [1, 64] {
            let refused = walk::<ModelInferRequest>(bytes, piece, WalkLimits::CLIENT).unwrap_err();
            assert!(matches!(refused, DecodeRefusal::Malformed(_)), "{bytes:?}: {refused}");
        }
    }
    assert!(walk::<ModelInferRequest>(&[], 1, WalkLimits::CLIENT).is_ok());
}

#[test]
fn refusals_of_messages_are_not_retryable() {
    for refusal in [DecodeRefusal::Malformed("x"), DecodeRefusal::TooLarge { len: 1, decoded: 2 }] {
        assert!(!refusal.failure().retryable, "{refusal}");
    }
}

fn tensor() -> impl Strategy<Value = InferInputTensor> {
    let parameter = prop_oneof![
        any::<bool>().prop_map(ParameterChoice::BoolParam),
        any::<i64>().prop_map(ParameterChoice::Int64Param),
        ".{0,9}".prop_map(ParameterChoice::StringParam),
        any::<f64>().prop_map(ParameterChoice::DoubleParam),
    ];
    let parameters = proptest::collection::btree_map(
        ".{0,5}",
        proptest::option::of(parameter).prop_map(|parameter_choice| InferParameter { parameter_choice }),
        0..4,
    );
    let contents = (
        proptest::collection::vec(any::<i32>(), 0..9),
        proptest::collection::vec(any::<u64>(), 0..9),
        proptest::collection::vec(any::<f32>(), 0..9),
        proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..5).prop_map(Bytes::from), 0..4),
    );
    let contents = contents.prop_map(|(int_contents, uint64_contents, fp32_contents, bytes_contents)| {
        InferTensorContents {
            int_contents,
            uint64_contents,
            fp32_contents,
            bytes_contents,
            ..Default::default()
        }
    });
    let shape = proptest::collection::vec(any::<i64>(), 0..4);
    (".{0,9}", shape, parameters, proptest::option::of(contents)).prop_map(
        |(name, shape, parameters, contents)| InferInputTensor {
            name,
            shape,
            parameters,
            contents,
            ..InferInputTensor::default()
        },
    )
}

fn request() -> impl Strategy<Value = ModelInferRequest> {
    let raw =
        proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from), 0..3);
    (".{0,9}", proptest::collection::vec(tensor(), 0..4), raw).prop_map(
        |(model_name, inputs, raw_input_contents)| ModelInferRequest {
            model_name,
            inputs,
            raw_input_contents,
            ..ModelInferRequest::default()
        },
    )
}

/// Returns the minimum memory of the vectors, strings and structs of a decoded request.
fn taken(request: &ModelInferRequest) -> u64 {
    let tensors = request.inputs.iter().map(|input| {
        let contents = input.contents.as_ref().map_or(0, |contents| {
            size_of_val(&contents.int_contents[..])
                + size_of_val(&contents.uint64_contents[..])
                + size_of_val(&contents.fp32_contents[..])
                + size_of_val(&contents.bytes_contents[..])
        });
        let parameters =
            input.parameters.keys().map(|name| size_of::<(String, InferParameter)>() + name.len());
        let lists = size_of_val(&input.shape[..]) + contents;
        size_of::<InferInputTensor>() + input.name.len() + parameters.sum::<usize>() + lists
    });
    (size_of::<ModelInferRequest>() + request.model_name.len() + tensors.sum::<usize>()) as u64
}

proptest! {
    /// The walk accepts every request in pieces of any size, and counts at least the memory that it
    /// takes.
    #[test]
    fn requests_are_accepted_in_pieces_of_any_size(request in request(), piece in 1usize..50) {
        let message = request.encode_to_vec();
        let decoded = walk::<ModelInferRequest>(&message, piece, WalkLimits::CLIENT);
        prop_assert_eq!(&decoded, &walk::<ModelInferRequest>(&message, 1 << 20, WalkLimits::CLIENT));
        prop_assert!(decoded.unwrap() >= taken(&request));
        prop_assert_eq!(decode::<ModelInferRequest>(message.into(), WalkLimits::CLIENT).unwrap(), request);
    }

    /// The walk also accepts messages of unknown length.
    #[test]
    fn requests_of_unknown_length_are_accepted(request in request()) {
        let message = request.encode_to_vec();
        let mut walk = MessageWalk::new(kind::<ModelInferRequest>(), None, WalkLimits::CLIENT);
        prop_assert!(walk.push(&message).is_ok());
        prop_assert!(walk.finish().is_ok());
    }

    /// The walk accepts everything that prost decodes, except groups, which none of the schemas
    /// has, and entries of maps with a wrong wire type, which prost does not check. It counts at
    /// least the memory that the message takes.
    #[test]
    fn damaged_requests_that_prost_decodes_are_accepted(
        request in request(),
        at in any::<proptest::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut message = request.encode_to_vec();
        prop_assume!(!message.is_empty());
        *at.get_mut(&mut message) = byte;
        let walked = walk::<ModelInferRequest>(&message, 7, WalkLimits::CLIENT);
        let stricter = [GROUP, UNLENGTHED].map(|why| Err(DecodeRefusal::Malformed(why)));
        if stricter.contains(&walked) {
            return Ok(());
        }
        if let Ok(decoded) = ModelInferRequest::decode(&message[..]) {
            prop_assert!(walked.as_ref().is_ok_and(|&bytes| bytes >= taken(&decoded)), "{walked:?}");
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic_the_walk(bytes in proptest::collection::vec(any::<u8>(), 0..300), piece in 1usize..50) {
        let walked = walk::<InvokeRequest>(&bytes, piece, WalkLimits::PEER);
        prop_assert_eq!(walked.is_ok(), walk::<InvokeRequest>(&bytes, 300, WalkLimits::PEER).is_ok());
    }
}

#[test]
fn memory_of_tensor_parts_is_counted() {
    let part = TensorPart { part: Some(tensor_part::Part::Data(Bytes::from_static(b"x"))) };
    let tensor = InferTensor { parts: vec![part; 1000], ..InferTensor::default() };
    let message = InvokeRequest { inputs: vec![tensor], ..InvokeRequest::default() }.encode_to_vec();
    let decoded = walk::<InvokeRequest>(&message, 100, WalkLimits::CLIENT).unwrap();
    assert!(decoded >= 1000 * size_of::<TensorPart>() as u64, "{decoded}");
}
