//! The common part of all attacks: connections from the attackers' own addresses, requests over
//! HTTP/1 and HTTP/2, and the counts of both. Each step waits for the governor first, and each wait
//! is bounded.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::ops::AddAssign;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rand::Rng as _;
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::governor::ProcessorPace;
use super::port::ServerPort;
use super::wire::AUTHORITY;

/// Maximum wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum wait until a piece of bytes is written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of a write, between two calls of the governor.
const PIECE: usize = 64 << 10;
/// Maximum bytes of a read of an answer.
const READ: usize = 16 << 10;

/// The counts of an attack, summed over all ports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttackCounts {
    /// Number of connections that were made.
    pub connections: u64,
    /// Number of connections that were refused or timed out.
    pub unconnected: u64,
    /// Number of requests, streams or malformed messages that were sent.
    pub sent: u64,
    /// Number of bytes that were sent.
    pub bytes: u64,
    /// Number of successful answers.
    pub accepted: u64,
    /// Number of answers with an error.
    pub refused: u64,
    /// Number of connections, streams and requests that the server ended without an answer.
    pub ended: u64,
}

impl AddAssign for AttackCounts {
    fn add_assign(&mut self, other: Self) {
        self.connections += other.connections;
        self.unconnected += other.unconnected;
        self.sent += other.sent;
        self.bytes += other.bytes;
        self.accepted += other.accepted;
        self.refused += other.refused;
        self.ended += other.ended;
    }
}

/// The counts of all attacks, by name.
#[derive(Debug, Clone, Default)]
pub(super) struct AttackTally(Arc<Mutex<BTreeMap<String, AttackCounts>>>);

impl AttackTally {
    /// Returns the counter of an attack.
    pub(super) fn of(&self, name: &str) -> AttackCounter {
        AttackCounter { tally: self.clone(), name: name.into() }
    }

    pub(super) fn counts(&self) -> BTreeMap<String, AttackCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A handle that adds to the counts of an attack.
#[derive(Debug, Clone)]
pub(super) struct AttackCounter {
    tally: AttackTally,
    name: Arc<str>,
}

impl AttackCounter {
    pub(super) fn add(&self, counts: AttackCounts) {
        let mut all = self.tally.0.lock().unwrap_or_else(PoisonError::into_inner);
        match all.get_mut(&*self.name) {
            Some(own) => *own += counts,
            None => {
                all.insert(self.name.to_string(), counts);
            }
        }
    }

    pub(super) fn sent(&self, sent: u64) {
        self.add(AttackCounts { sent, ..AttackCounts::default() });
    }

    pub(super) fn ended(&self) {
        self.add(AttackCounts { ended: 1, ..AttackCounts::default() });
    }

    fn answered(&self, success: bool) {
        let (accepted, refused) = if success { (1, 0) } else { (0, 1) };
        self.add(AttackCounts { accepted, refused, ..AttackCounts::default() });
    }
}

/// An attack on a port.
#[derive(Debug, Clone)]
pub(super) struct Attacker {
    pub(super) port: ServerPort,
    pub(super) sources: Arc<[IpAddr]>,
    /// Whether no other attack runs at the same time.
    pub(super) alone: bool,
    /// A function of the cluster, which requests name.
    pub(super) function: Arc<str>,
    pub(super) rng: StdRng,
    pub(super) pace: ProcessorPace,
    pub(super) counts: AttackCounter,
}

impl Attacker {
    /// Returns the same attack with its own seed.
    pub(super) fn another(&mut self) -> Self {
        let rng = <StdRng as rand::SeedableRng>::seed_from_u64(self.rng.random());
        Self { rng, ..self.clone() }
    }

    /// Connects from a random source address.
    pub(super) async fn connect(&mut self) -> Option<TcpStream> {
        self.connect_with(None).await
    }

    /// Connects with a receive buffer of this many bytes.
    pub(super) async fn connect_with(&mut self, receive_buffer: Option<u32>) -> Option<TcpStream> {
        self.pace.keep().await;
        let source = self.sources[self.rng.random_range(0..self.sources.len())];
        let connected = timeout(CONNECT_TIMEOUT, connect(source, self.port, receive_buffer)).await;
        let stream = connected.ok().and_then(Result::ok);
        let (connections, unconnected) = if stream.is_some() { (1, 0) } else { (0, 1) };
        self.counts.add(AttackCounts { connections, unconnected, ..AttackCounts::default() });
        stream
    }

    /// Writes bytes piece by piece. Returns whether all of them were written.
    pub(super) async fn write(
        &self,
        stream: &mut (impl tokio::io::AsyncWrite + Unpin),
        bytes: &[u8],
    ) -> bool {
        for piece in bytes.chunks(PIECE) {
            self.pace.keep().await;
            if !matches!(timeout(WRITE_TIMEOUT, stream.write_all(piece)).await, Ok(Ok(()))) {
                return false;
            }
            self.counts.add(AttackCounts { bytes: piece.len() as u64, ..AttackCounts::default() });
        }
        true
    }

    /// Sends the beginning of a request and then a piece at each interval, until all pieces are
    /// sent or the server ends the connection.
    pub(super) async fn send_slowly(
        &mut self,
        stream: TcpStream,
        beginning: &[u8],
        pieces: impl Iterator<Item = Vec<u8>>,
        every: Duration,
    ) {
        let mut connection = DiscardingConnection::to(stream, self.pace.clone());
        self.counts.sent(1);
        let mut goes_on = self.write(&mut connection.write, beginning).await;
        for piece in pieces {
            tokio::select! {
                () = connection.closed() => goes_on = false,
                () = tokio::time::sleep(every) => {}
            }
            if !goes_on {
                return self.counts.ended();
            }
            goes_on = self.write(&mut connection.write, &piece).await;
        }
    }

    /// Sends an HTTP/1 request over a new connection, and reads the beginning of the answer.
    pub(super) async fn request(&mut self, request: &[u8]) {
        self.request_in_parts(&[request]).await;
    }

    /// Sends an HTTP/1 request that consists of several parts, as [`Self::request`] does.
    pub(super) async fn request_in_parts(&mut self, parts: &[&[u8]]) {
        let Some(mut stream) = self.connect().await else { return };
        self.counts.sent(1);
        // A server that refuses the parts so far answers before it has received all of them.
        for part in parts {
            if !self.write(&mut stream, part).await {
                break;
            }
        }
        self.hear(&mut stream).await;
    }

    /// Reads and counts the first line of an HTTP/1 answer.
    pub(super) async fn hear(&self, stream: &mut TcpStream) {
        let mut heard = [0; 64];
        let read = timeout(ANSWER_TIMEOUT, stream.read(&mut heard)).await;
        match read {
            Ok(Ok(len @ 1..)) => self.counts.answered(heard[..len].starts_with(b"HTTP/1.1 2")),
            Ok(_) => self.counts.ended(),
            // The server does not answer in time: the attack continues with its next request.
            Err(_) => {}
        }
    }

    /// Makes a gRPC call over a new connection. The body need not be a complete message.
    pub(super) async fn call(&mut self, method: &str, encoding: Option<&str>, body: Bytes) {
        self.call_with_window(method, encoding, body, None).await;
    }

    /// Makes a gRPC call with a window of this many bytes for the answer. With a window of 0, the
    /// call ends with the attack.
    pub(super) async fn call_with_window(
        &mut self,
        method: &str,
        encoding: Option<&str>,
        body: Bytes,
        window: Option<u32>,
    ) {
        let Some(stream) = self.connect().await else { return };
        self.counts.sent(1);
        let call = call(stream, method, encoding, body, window, &self.pace);
        let patience = if window == Some(0) { Duration::MAX } else { ANSWER_TIMEOUT };
        match timeout(patience, call).await {
            Ok(Ok(Answered { success, bytes })) => {
                self.counts.add(AttackCounts { bytes, ..AttackCounts::default() });
                self.counts.answered(success);
            }
            Ok(Err(_)) => self.counts.ended(),
            Err(_) => {}
        }
    }
}

/// Opens a socket that is reset when it is dropped, so that no port stays in TIME_WAIT for a
/// minute.
async fn connect(source: IpAddr, port: ServerPort, receive_buffer: Option<u32>) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_zero_linger()?;
    if let Some(bytes) = receive_buffer {
        socket.set_recv_buffer_size(bytes)?;
    }
    socket.bind((source, 0).into())?;
    let stream = socket.connect(port.address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// A connection whose answers are read and discarded.
pub(super) struct DiscardingConnection {
    pub(super) write: OwnedWriteHalf,
    /// The task that reads, which ends when this value is dropped or the server closes the
    /// connection.
    reading: JoinSet<()>,
}

impl DiscardingConnection {
    pub(super) fn to(stream: TcpStream, pace: ProcessorPace) -> Self {
        let (read, write) = stream.into_split();
        let mut reading = JoinSet::new();
        reading.spawn(discard(read, pace));
        Self { write, reading }
    }

    /// Waits until the server has closed the connection.
    pub(super) async fn closed(&mut self) {
        self.reading.join_next().await;
    }
}

async fn discard(mut read: OwnedReadHalf, pace: ProcessorPace) {
    let mut bytes = vec![0; READ];
    while matches!(read.read(&mut bytes).await, Ok(1..)) {
        pace.keep().await;
    }
}

struct Answered {
    success: bool,
    bytes: u64,
}

async fn call(
    stream: TcpStream,
    method: &str,
    encoding: Option<&str>,
    mut body: Bytes,
    window: Option<u32>,
    pace: &ProcessorPace,
) -> Result<Answered, h2::Error> {
    let mut builder = h2::client::Builder::new();
    if let Some(window) = window {
        builder.initial_window_size(window);
    }
    let (sender, connection) = builder.handshake::<_, Bytes>(stream).await?;
    let mut driving = JoinSet::new();
    driving.spawn(async move {
        // The call itself reports the error.
        let _ended = connection.await;
    });
    let mut request = http::Request::post(format!("http://{AUTHORITY}{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    if let Some(encoding) = encoding {
        request = request.header("grpc-encoding", encoding);
    }
    let request = request.body(()).expect("the method is a path and the headers are text");
    let (answer, mut sending) = sender.ready().await?.send_request(request, body.is_empty())?;
    let mut bytes = 0;
    let sent = async {
        while !body.is_empty() {
            pace.keep().await;
            sending.reserve_capacity(body.len().min(PIECE));
            let Some(room) = std::future::poll_fn(|cx| sending.poll_capacity(cx)).await else { break };
            let piece = body.split_to(room?.min(body.len()));
            bytes += piece.len() as u64;
            sending.send_data(piece, body.is_empty())?;
        }
        Ok::<_, h2::Error>(())
    };
    // A server that refuses the bytes so far ends the stream. Its answer tells more than the error
    // of the write.
    let _stopped = sent.await;
    let answer = answer.await?;
    let failed = answer.headers().get("grpc-status").is_some_and(|status| status != "0");
    let success = answer.status().is_success() && !failed;
    let mut incoming = answer.into_body();
    while let Some(data) = incoming.data().await {
        pace.keep().await;
        incoming.flow_control().release_capacity(data?.len())?;
    }
    let trailers = incoming.trailers().await?;
    let ended_well = trailers.is_none_or(|it| it.get("grpc-status").is_none_or(|status| status == "0"));
    Ok(Answered { success: success && ended_well, bytes })
}
