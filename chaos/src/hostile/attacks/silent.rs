//! Thousands of connections that send nothing, a part of the HTTP/2 preface, or only the preface. A
//! connection that the server closes is replaced.

use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::hostile::attacker::Attacker;
use crate::hostile::wire;

/// Number of connections to each port: more than the limit of three addresses with a quarter of
/// 2,048 each.
const CONNECTIONS: usize = 2_100;
/// Number of connections while all attacks run together: few enough that other clients can connect
/// from the same addresses.
const CONNECTIONS_AMONG_OTHERS: usize = 600;
/// Interval between two checks of all connections.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Maximum number of checks in a turn.
const LOOKS_MAX: usize = 10_000;
/// Maximum number of connections that are opened between two checks.
const OPENED_MAX: usize = 700;

pub(super) async fn run(mut attacker: Attacker) {
    let wanted = if attacker.alone { CONNECTIONS } else { CONNECTIONS_AMONG_OTHERS };
    let mut held: Vec<TcpStream> = Vec::with_capacity(wanted);
    for _ in 0..LOOKS_MAX {
        let before = held.len();
        held.retain(is_open);
        for _ in held.len()..before {
            attacker.counts.ended();
        }
        for number in 0..OPENED_MAX.min(wanted - held.len()) {
            let Some(mut stream) = attacker.connect().await else { break };
            // The bytes are few: the socket's buffer accepts them at once, unless the server has
            // closed the connection.
            if stream.write_all(says(number)).await.is_ok() {
                held.push(stream);
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Returns all bytes that a connection sends.
fn says(number: usize) -> &'static [u8] {
    match number % 4 {
        0 | 1 => &[],
        2 => &wire::PREFACE[..wire::PREFACE.len() / 2],
        _ => wire::PREFACE,
    }
}

/// Whether a connection is still open, even if the server has sent bytes.
fn is_open(stream: &TcpStream) -> bool {
    let mut heard = [0; 256];
    match stream.try_read(&mut heard) {
        Ok(len) => len > 0,
        Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
    }
}
