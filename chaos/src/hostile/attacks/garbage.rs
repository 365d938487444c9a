//! Bytes of no protocol, or of another one: random bytes, TLS client hellos, and pipelines of
//! malformed requests.

use std::time::Duration;

use rand::Rng as _;
use rand::rngs::StdRng;

use crate::hostile::attacker::Attacker;
use crate::hostile::wire;

const EVERY: Duration = Duration::from_millis(100);
const CONNECTIONS_MAX: usize = 10_000;
/// Maximum random bytes of a connection.
const RANDOM_MAX: usize = 8 << 10;
/// Number of requests in a pipeline.
const PIPELINE: usize = 200;

pub(super) async fn run(mut attacker: Attacker) {
    for _ in 0..CONNECTIONS_MAX {
        let bytes = rubbish(&attacker.function, &mut attacker.rng);
        attacker.request(&bytes).await;
        tokio::time::sleep(EVERY).await;
    }
}

fn rubbish(function: &str, rng: &mut StdRng) -> Vec<u8> {
    let random = |rng: &mut StdRng| {
        let len = rng.random_range(1..RANDOM_MAX);
        (0..len).map(|_| rng.random()).collect::<Vec<u8>>()
    };
    match rng.random_range(0..10) {
        0 | 1 => random(rng),
        2 => client_hello(rng),
        3 => [wire::PREFACE, &random(rng)].concat(),
        4 => b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nNOT /a/request\r\n\r\n".repeat(PIPELINE),
        5 => b"GET /v2/health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".repeat(PIPELINE),
        6 => {
            let fields: String = (0..10_000).map(|number| format!("x-{number}: {number}\r\n")).collect();
            format!("GET /v2 HTTP/1.1\r\nhost: 127.0.0.1\r\n{fields}\r\n").into_bytes()
        }
        7 => format!("GET /{} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", "%41".repeat(30_000)).into_bytes(),
        8 => chunks_without_end(function),
        _ => two_lengths(function),
    }
}

/// Returns a TLS record with a client hello that has right lengths and a random body.
fn client_hello(rng: &mut StdRng) -> Vec<u8> {
    let body: Vec<u8> = (0..512).map(|_| rng.random()).collect();
    let hello = [&[1, 0, 2, 0][..], &body].concat();
    [&[0x16, 3, 1, 2, 4][..], &hello].concat()
}

fn chunks_without_end(function: &str) -> Vec<u8> {
    let head = format!("POST {} HTTP/1.1\r\nhost: 127.0.0.1\r\n", wire::infer(function));
    let chunks = "1;x=y\r\n \r\n".repeat(10_000);
    format!("{head}transfer-encoding: chunked\r\n\r\n{chunks}FFFFFFFFFFFFFFFFF\r\n").into_bytes()
}

/// Returns a request whose body has two lengths, and chunks besides, so that its end is ambiguous.
fn two_lengths(function: &str) -> Vec<u8> {
    let more = [("content-length", "4"), ("transfer-encoding", "chunked")];
    wire::post(&wire::infer(function), &more, 10, b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n")
}
