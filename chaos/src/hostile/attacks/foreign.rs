//! Requests that a page in a browser would send for another site: a foreign `Host`, a foreign
//! `Origin`, or a form. A server that obeys such a request stops a function that clients use.

use std::time::Duration;

use crate::hostile::attacker::Attacker;
use crate::hostile::wire;

const EVERY: Duration = Duration::from_millis(500);
const REQUESTS_MAX: usize = 10_000;
const SITE: &str = "attacker.example";

pub(super) async fn run(mut attacker: Attacker) {
    for number in 0..REQUESTS_MAX {
        let request = request(number, &attacker.function);
        attacker.request(&request).await;
        tokio::time::sleep(EVERY).await;
    }
}

fn request(number: usize, function: &str) -> Vec<u8> {
    let unload = format!("/v2/repository/models/{function}/unload");
    let own = "127.0.0.1";
    match number % 5 {
        0 => post(&unload, SITE, &[("content-type", "application/json")], b"{}"),
        1 => post(
            &unload,
            own,
            &[("origin", "http://attacker.example"), ("content-type", "application/json")],
            b"{}",
        ),
        2 => post(&unload, own, &[("origin", "null"), ("content-type", "text/plain")], b"{}"),
        3 => post(&unload, SITE, &[("origin", "http://attacker.example")], b""),
        _ => {
            let message = wire::message(false, &wire::field(2, function.as_bytes()));
            let path = "/inference.GRPCInferenceService/RepositoryModelUnload";
            post(path, SITE, &[("content-type", "application/grpc"), ("te", "trailers")], &message)
        }
    }
}

fn post(path: &str, host: &str, more: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in more {
        head += &format!("{name}: {value}\r\n");
    }
    head += "\r\n";
    [head.as_bytes(), body].concat()
}
