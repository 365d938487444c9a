//! Entry points for the fuzz targets of `fuzz/`, which read clients' bytes. Compiled only for these targets.

use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use http::HeaderMap;
use http::header::HeaderValue;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use millrace_proto::decoding::{self, MessageType, WalkLimits};
use millrace_proto::inference::ModelInferRequest;
use millrace_transport::MinimumRate;
use millrace_types::tensor::{Dim, element_count};
use millrace_types::{DataType, FunctionKey, FunctionName, Revision, Runtime, TenantName, TensorSpec};
use tonic::Status;

use crate::backend::{Kind, ModelAvailability, ModelRevision, RequestContents};
use crate::budget::ByteBudget;
use crate::bulk::BulkThreads;
use crate::config::message_len;
use crate::decompression::{ContentEncoding, Inflater, STEP};
use crate::framing::{BodyBounds, CallCharges, ChargeRelease, ChargedMessages};
use crate::rest::elements::has_json;
use crate::rest::request::{self, HEADER_LENGTH};

/// Longest decompressed message of the targets. The default of servers is larger than the memory that
/// a target may use.
const INFLATED_BYTES_MAX: usize = 4 << 20;
/// Threads for messages with long decompression.
static BULK: LazyLock<BulkThreads> =
    LazyLock::new(|| BulkThreads::start().expect("the operating system starts threads"));

/// Returns the models against which requests are read: with an image, with a list of numbers, with an
/// input of each served datatype, and with an input of each datatype that has a JSON form.
fn models() -> [ModelRevision; 4] {
    let tensor = |name: &str, datatype, shape: &[u64]| TensorSpec {
        name: name.to_owned(),
        datatype,
        shape: [Dim::Symbol("n".to_owned())]
            .into_iter()
            .chain(shape.iter().copied().map(Dim::Fixed))
            .collect(),
    };
    let image = tensor("image", DataType::Fp32, &[1, 8, 8]);
    let numbers = tensor("numbers", DataType::Int64, &[]);
    let each = DataType::ALL.map(|datatype| tensor(datatype.as_str(), datatype, &[]));
    let [served, json] = [|datatype: DataType| datatype.size().is_some(), has_json]
        .map(|has: fn(DataType) -> bool| each.iter().filter(|input| has(input.datatype)).cloned().collect());
    [vec![image], vec![numbers], served, json].map(|inputs| ModelRevision {
        key: FunctionKey {
            tenant: TenantName::default(),
            name: FunctionName::new("digits").expect("a name as users give"),
        },
        revision: Revision::FIRST,
        revisions: vec![Revision::FIRST],
        kind: Kind::Function(Runtime::default()),
        inputs,
        outputs: vec![tensor("scores", DataType::Fp32, &[10])],
        timeout: Duration::from_secs(30),
        objective: None,
        idempotent: true,
        sequences: None,
        weights: millrace_types::Bytes::mib(1),
        availability: ModelAvailability::Ready,
    })
}

/// Checks that an accepted request has as many elements as the request declares.
fn check(contents: &RequestContents) {
    for tensor in &contents.inputs {
        let Some(size) = tensor.datatype.size() else { continue };
        let elements = element_count(&tensor.shape).expect("a shape that was accepted");
        assert_eq!(tensor.data.len(), elements * size, "{tensor:?}");
    }
}

/// Reads a REST request: the value of `Inference-Header-Content-Length` or `-` for none, a newline,
/// and the body.
pub fn rest_request(data: &[u8]) {
    let Some(at) = data.iter().position(|&byte| byte == b'\n') else { return };
    let length = &data[..at];
    let body = Bytes::copy_from_slice(&data[at + 1..]);
    let mut headers = HeaderMap::new();
    if length != b"-" {
        let Ok(length) = HeaderValue::from_bytes(length) else { return };
        headers.insert(HEADER_LENGTH, length);
    }
    let limits = crate::GatewayLimits::default();
    let budget = ByteBudget::new(limits.message_max, limits.message_max);
    for model in models() {
        let Ok(cut) = request::cut(&headers, body.clone()) else { return };
        let Ok(mut charge) = budget.share().try_take(body.len() as u64) else { return };
        if let Ok((contents, _)) =
            request::read_request(&model, cut, message_len(limits.message_max), &mut charge)
        {
            check(&contents);
        }
    }
    assert_eq!(budget.used(), 0, "every byte is released");
}

/// Reads a gRPC request: checks, decodes and reads a `ModelInferRequest` as a server does.
pub fn grpc_request(data: &[u8]) {
    let message = Bytes::copy_from_slice(data);
    let len_max = message_len(crate::GatewayLimits::default().message_max);
    for model in models() {
        let Ok(request) = decoding::decode::<ModelInferRequest>(message.clone(), WalkLimits::CLIENT) else {
            return;
        };
        if let Ok(contents) = crate::grpc::infer::read_request(&model, request, len_max) {
            check(&contents);
        }
    }
}

/// Reads the body of a gRPC call. The first byte selects the [`ChargeRelease`] and the compression, and the
/// second selects the size of the pieces.
pub fn grpc_framing(data: &[u8]) {
    let [how, piece, body @ ..] = data else { return };
    let hold = [ChargeRelease::WholeCall, ChargeRelease::UntilNext, ChargeRelease::UntilClaimed]
        [usize::from(how % 3)];
    let encoding =
        [None, Some(ContentEncoding::Gzip), Some(ContentEncoding::Deflate)][usize::from(how / 3 % 3)];
    let message_max = millrace_types::Bytes(INFLATED_BYTES_MAX as u64);
    let budget = ByteBudget::new(message_max, message_max);
    let terms = BodyBounds {
        share: budget.share(),
        message_len_max: INFLATED_BYTES_MAX,
        minimum_rate: MinimumRate { grace: Duration::from_secs(60), bytes_per_sec: 1 },
        bulk: BULK.clone(),
        encoding,
        hold,
        message_type: MessageType::named("inference.ModelInferRequest").filter(|_| how / 9 % 2 == 0),
    };
    let pieces: Vec<_> = body
        .chunks(usize::from(*piece).pow(2).max(1))
        .map(|piece| Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(piece))))
        .collect();
    let ledger = CallCharges::default();
    let mut messages = ChargedMessages::new(StreamBody::new(stream::iter(pieces)), terms, ledger.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime without sockets").block_on(async {
        while let Some(Ok(_)) = messages.frame().await {
            while hold == ChargeRelease::UntilClaimed && ledger.claim().is_some() {}
        }
    });
    drop((messages, ledger));
    assert_eq!(budget.used(), 0, "every byte is released");
}

/// Decompresses a body. The first byte selects the compression, and the second selects the size of
/// the pieces.
pub fn inflate(data: &[u8]) {
    let [how, piece, body @ ..] = data else { return };
    let encoding = [ContentEncoding::Gzip, ContentEncoding::Deflate][usize::from(how % 2)];
    let message_max = millrace_types::Bytes(INFLATED_BYTES_MAX as u64);
    let budget = ByteBudget::new(message_max, message_max);
    let Ok(charge) = budget.share().try_take(0) else { return };
    let mut inflater = Inflater::new(encoding, b"", INFLATED_BYTES_MAX, charge);
    for piece in body.chunks(usize::from(*piece).pow(2).clamp(1, STEP)) {
        if inflater.push(piece).is_err() {
            return;
        }
    }
    if let Ok((plain, charge)) = inflater.finish() {
        assert!(plain.len() <= INFLATED_BYTES_MAX);
        assert_eq!(budget.used(), plain.len() as u64);
        drop(charge);
    }
    assert_eq!(budget.used(), 0, "every byte is released");
}
