//! Connections by the thousand that say nothing, a part of the preface of HTTP/2, or the preface and
//! nothing more. A connection that the server closes is replaced by another.

use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::hostile::attacker::Attacker;
use crate::hostile::wire;

/// Connections to each port: more than three addresses may have where each has a quarter of 2,048.
const CONNECTIONS: usize = 2_100;
/// While all attacks go on together: so few that others find a place at the same addresses.
const CONNECTIONS_AMONG_OTHERS: usize = 600;
/// The wait between two looks at all of them, and the looks of one turn.
const LOOK_EVERY: Duration = Duration::from_millis(500);
const LOOKS_MAX: usize = 10_000;
/// Connections that are opened between two looks.
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
            // Few bytes: the socket's buffer takes them at once, or the server has closed it.
            if stream.write_all(says(number)).await.is_ok() {
                held.push(stream);
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// All that a connection says.
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
