//! Tensors whose shapes announce more elements than are sent: in JSON, in JSON followed by binary
//! data, and in gRPC.

use std::time::Duration;

use rand::Rng as _;
use rand::rngs::StdRng;

use crate::hostile::attacker::Attacker;
use crate::hostile::wire;

const EVERY: Duration = Duration::from_millis(250);
const REQUESTS_MAX: usize = 10_000;
/// The possible sizes of a dimension.
const SIZES: [i64; 9] = [1 << 40, 1 << 48, 1 << 31, i64::MAX, i64::MAX / 4, -1, i64::MIN, 0, (1 << 62) + 1];
/// The second dimension of an `mlp`, which is fixed.
const WIDTH: i64 = 64;

pub(super) async fn run(mut attacker: Attacker) {
    let methods = wire::methods(attacker.port.kind);
    for number in 0..REQUESTS_MAX {
        let shape = shape(&mut attacker.rng);
        match number % 3 {
            0 => {
                let body = json(&shape, r#""data":[0]"#);
                let path = wire::infer(&attacker.function);
                attacker.request(&wire::post(&path, &[], body.len(), body.as_bytes())).await;
            }
            1 => {
                let request = with_binary_data(&attacker.function, &shape, &mut attacker.rng);
                attacker.request(&request).await;
            }
            _ => {
                let method = methods[attacker.rng.random_range(0..methods.len())];
                let bytes = grpc(&attacker.function, &shape, attacker.rng.random());
                attacker.call(method, None, wire::message(false, &bytes)).await;
            }
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Draws a shape of two dimensions, as in the model's input, or of up to eight.
fn shape(rng: &mut StdRng) -> Vec<i64> {
    let size = |rng: &mut StdRng| SIZES[rng.random_range(0..SIZES.len())];
    match rng.random_range(0..3) {
        0 | 1 => vec![size(rng), WIDTH],
        _ => (0..rng.random_range(1..9)).map(|_| size(rng)).collect(),
    }
}

fn json(shape: &[i64], data: &str) -> String {
    let sizes: Vec<_> = shape.iter().map(ToString::to_string).collect();
    let sizes = sizes.join(",");
    format!(r#"{{"inputs":[{{"name":"x","datatype":"FP32","shape":[{sizes}],{data}}}]}}"#)
}

/// Returns a request that claims lengths of its JSON header and of the binary data after the
/// header.
fn with_binary_data(function: &str, shape: &[i64], rng: &mut StdRng) -> Vec<u8> {
    let sizes = [0, 256, 1 << 40, u64::MAX];
    let promised = sizes[rng.random_range(0..sizes.len())];
    let mut body = json(shape, &format!(r#""parameters":{{"binary_data_size":{promised}}}"#)).into_bytes();
    let header_length = match rng.random_range(0..3) {
        0 => body.len().to_string(),
        1 => "18446744073709551615".to_owned(),
        _ => "-1".to_owned(),
    };
    body.extend([0; 256]);
    let more = [("inference-header-content-length", header_length.as_str())];
    wire::post(&wire::infer(function), &more, body.len(), &body)
}

/// Returns a `ModelInferRequest`, with or without a raw tensor.
fn grpc(function: &str, shape: &[i64], with_raw: bool) -> Vec<u8> {
    let sizes: Vec<u8> = shape.iter().flat_map(|&size| wire::varint(size.cast_unsigned())).collect();
    let tensor = [wire::field(1, b"x"), wire::field(2, b"FP32"), wire::field(3, &sizes)].concat();
    let mut request = [wire::field(1, function.as_bytes()), wire::field(5, &tensor)].concat();
    if with_raw {
        request.extend(wire::field(7, &[0; 256]));
    }
    request
}
