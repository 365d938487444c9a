//! Giant and deep JSON: arrays in parameters, nested brackets, hundred thousands of keys, and
//! endless numbers and strings.

use std::sync::LazyLock;
use std::time::Duration;

use rand::Rng as _;

use crate::hostile::attacker::Attacker;
use crate::hostile::wire;

const EVERY: Duration = Duration::from_secs(2);
const REQUESTS_MAX: usize = 1_000;
/// Bytes of a body.
const BODY: usize = 4 << 20;
/// Bytes of a large body.
const LARGE_BODY: usize = 32 << 20;

/// Number of kinds of bodies.
const KINDS: usize = 7;

static BODIES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| bodies(BODY));
static LARGE_BODIES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| bodies(LARGE_BODY));

/// Builds the bodies in advance, so that the attackers' share is not spent on this work.
pub(super) fn prepare() {
    for bodies in [&BODIES, &LARGE_BODIES] {
        LazyLock::force(bodies);
    }
}

pub(super) async fn run(mut attacker: Attacker) {
    for number in 0..REQUESTS_MAX {
        let bodies = if attacker.rng.random_ratio(1, 8) { &LARGE_BODIES } else { &BODIES };
        let body = &bodies[number % KINDS];
        let head = wire::post(&wire::infer(&attacker.function), &[], body.len(), &[]);
        attacker.request_in_parts(&[&head, body]).await;
        tokio::time::sleep(EVERY).await;
    }
}

fn bodies(size: usize) -> Vec<Vec<u8>> {
    (0..KINDS).map(|kind| body(kind, size)).collect()
}

fn body(kind: usize, size: usize) -> Vec<u8> {
    let around = |before: &str, middle: &[u8], after: &str| {
        let middle = middle.repeat(size / middle.len());
        [before.as_bytes(), &middle, after.as_bytes()].concat()
    };
    match kind {
        0 => around(r#"{"inputs":[],"parameters":{"p":["#, b"0,", "0]}}"),
        1 => around(r#"{"inputs":[],"parameters":{"p":"#, b"[", ""),
        2 => around(r#"{"inputs":[],"parameters":{"#, br#""k":[],"#, r#""z":0}}"#),
        3 => around(r#"{"inputs":[{"name":"x","datatype":"FP32","shape":[1,64],"data":["#, b"0,", "0]}]}"),
        4 => around(r#"{"inputs":[{"name":"x","datatype":"FP32","shape":[1,64],"data":"#, b"[", ""),
        5 => around(r#"{"id":""#, br"A", r#"","inputs":[]}"#),
        _ => around(r#"{"inputs":[{"name":"x","datatype":"INT64","shape":["#, b"9", "]}]}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_body_has_the_requested_size() {
        for kind in 0..KINDS {
            let len = body(kind, BODY).len();
            assert!((BODY - 16..BODY + 128).contains(&len), "{kind}: {len}");
        }
        assert!(serde_json::from_slice::<serde_json::Value>(&body(0, 1 << 10)).is_ok());
    }
}
