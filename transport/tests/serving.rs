//! A served port as its clients see it.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use millrace_transport::{
    ArrivingMessages, PortLimits, ServedPort, ServerConfig, listen, serve, serve_service,
};
use rustix::process::getpriority_process;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n";
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// A time limit that no test reaches.
const LONG: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_millis(20);

struct Port {
    address: SocketAddr,
    /// Set to true to answer the requests to `/hold`.
    release: watch::Sender<bool>,
    /// Number of requests to `/hold` that have begun.
    held: watch::Receiver<usize>,
    _serving: ServedPort,
}

fn patient() -> ServerConfig {
    ServerConfig { opening_max: LONG, head_max: LONG, idle_max: LONG, ..ServerConfig::default() }
}

/// Returns the niceness of the current thread.
fn niceness() -> i32 {
    getpriority_process(None).unwrap()
}

async fn port(config: ServerConfig) -> Port {
    let (listener, address) = listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let release = watch::Sender::new(false);
    let released = release.subscribe();
    let (holding, held) = watch::channel(0);
    let serving = serve(listener, config, move |_peer| {
        let released = released.clone();
        let holding = holding.clone();
        move |request: Request<_>| {
            let mut released = released.clone();
            let holding = holding.clone();
            async move {
                if request.uri().path() == "/hold" {
                    holding.send_modify(|held| *held += 1);
                    released.wait_for(|&released| released).await.unwrap();
                }
                if request.uri().path() == "/niceness" {
                    return Response::new(Full::new(niceness().to_string().into()));
                }
                Response::new(Full::new(Bytes::from_static(b"here")))
            }
        }
    });
    Port { address, release, held, _serving: serving }
}

impl Port {
    async fn open(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    async fn say(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = self.open().await;
        stream.write_all(bytes).await.unwrap();
        stream
    }

    /// Returns a connection whose request is under way.
    async fn hold(&mut self) -> TcpStream {
        let before = *self.held.borrow();
        let stream = self.say(b"GET /hold HTTP/1.1\r\nhost: here\r\n\r\n").await;
        self.held.wait_for(|&held| held > before).await.unwrap();
        stream
    }

    /// Returns the niceness of the thread that serves a new connection of this address.
    async fn niceness_for(&self, address: &str) -> i32 {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{address}:0").parse().unwrap()).unwrap();
        let stream = socket.connect(self.address).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = Request::get("/niceness").header("host", "here").body(Empty::<Bytes>::new()).unwrap();
        let answer = sender.send_request(request).await.unwrap().into_body().collect().await.unwrap();
        String::from_utf8(answer.to_bytes().to_vec()).unwrap().parse().unwrap()
    }

    async fn ask(&self) -> u16 {
        let (mut sender, connection) = http1::handshake(TokioIo::new(self.open().await)).await.unwrap();
        tokio::spawn(connection);
        let request = Request::builder().uri("/").header("host", "here");
        sender.send_request(request.body(Empty::<Bytes>::new()).unwrap()).await.unwrap().status().as_u16()
    }
}

/// Waits until the server has ended the connection.
async fn ended(mut stream: TcpStream) {
    // A reset also ends the connection.
    let _bytes = stream.read_to_end(&mut Vec::new()).await.is_ok();
}

#[tokio::test]
async fn a_connection_that_sends_no_byte_is_ended() {
    let port = port(ServerConfig { opening_max: SHORT, ..patient() }).await;
    ended(port.open().await).await;
}

#[tokio::test]
async fn a_connection_that_sends_half_a_preface_is_ended() {
    let port = port(ServerConfig { opening_max: SHORT, ..patient() }).await;
    ended(port.say(&PREFACE[..10]).await).await;
}

#[tokio::test]
async fn a_connection_that_sends_only_a_preface_is_ended() {
    let port = port(ServerConfig { opening_max: SHORT, head_max: SHORT, ..patient() }).await;
    ended(port.say(PREFACE).await).await;
}

#[tokio::test]
async fn a_connection_with_an_unfinished_request_head_is_ended() {
    let port = port(ServerConfig { head_max: SHORT, ..patient() }).await;
    ended(port.say(&REQUEST[..REQUEST.len() - 2]).await).await;
}

#[tokio::test]
async fn an_idle_http2_connection_is_ended_gracefully() {
    let port = port(ServerConfig { opening_max: SHORT, idle_max: SHORT, ..patient() }).await;
    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(port.open().await)).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = Request::builder().uri(format!("http://{}/", port.address));
    let answer = sender.send_request(request.body(Empty::<Bytes>::new()).unwrap()).await.unwrap();
    assert_eq!(answer.status(), 200);
    drop(answer);
    // The client sees a graceful end, not a failure.
    connection.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_new_connection_displaces_a_silent_one_of_a_full_port() {
    let port = port(ServerConfig { port: PortLimits::new(4), ..patient() }).await;
    let mut silent = Vec::new();
    for _ in 0..4 {
        silent.push(port.open().await);
    }
    assert_eq!(port.ask().await, 200);
    // The oldest connection was displaced.
    ended(silent.remove(0)).await;
}

/// With tokio's queue of 128, the kernel would not answer the remaining clients until a connection is
/// accepted.
#[tokio::test]
async fn hundreds_of_clients_connect_before_one_is_accepted() {
    let allowed = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    let crowd = allowed.trim().parse::<usize>().unwrap().min(400);
    let (listener, address) = listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let connected = futures::future::try_join_all((0..crowd).map(|_| TcpStream::connect(address)));
    assert_eq!(tokio::time::timeout(LONG / 60, connected).await.unwrap().unwrap().len(), crowd);
    drop(listener);
}

#[tokio::test]
async fn a_new_connection_waits_while_a_full_port_is_busy() {
    let mut port = port(ServerConfig { port: PortLimits::new(1), ..patient() }).await;
    let mut busy = port.hold().await;
    let waiting = port.ask();
    let mut waiting = std::pin::pin!(waiting);
    // The new connection gets a slot only when the busy request ends.
    assert!(tokio::time::timeout(SHORT, waiting.as_mut()).await.is_err());
    port.release.send_replace(true);
    let mut first = [0; 12];
    busy.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    // The busy connection is idle now, and is displaced.
    assert_eq!(waiting.await, 200);
}

/// Returns the window of a new stream according to the server's SETTINGS.
async fn stream_window(connection: &mut TcpStream) -> u32 {
    const INITIAL_WINDOW_SIZE: u16 = 4;
    let len = [connection.read_u8().await.unwrap().into(), connection.read_u16().await.unwrap()];
    let mut rest = vec![0; 6 + usize::from(len[0]) * 0x1_0000 + usize::from(len[1])];
    connection.read_exact(&mut rest).await.unwrap();
    // The frame's kind, flags and stream precede its settings.
    let settings = rest[6..].chunks_exact(6).map(|it| it.split_first_chunk().unwrap());
    let window = settings.map(|(id, value)| (u16::from_be_bytes(*id), value));
    let (_, value) = window.clone().find(|(id, _)| *id == INITIAL_WINDOW_SIZE).unwrap();
    u32::from_be_bytes(value.try_into().unwrap())
}

#[tokio::test]
async fn connections_beyond_the_roomy_ones_have_narrow_windows() {
    let port = port(ServerConfig { windows_max: 2 << 20, connection_window: 2 << 20, ..patient() }).await;
    let hello = [PREFACE, b"\0\0\0\x04\0\0\0\0\0"].concat();
    let mut first = port.say(&hello).await;
    assert_eq!(stream_window(&mut first).await, 1 << 20);
    let mut second = port.say(&hello).await;
    assert_eq!(stream_window(&mut second).await, 65_535);
}

#[tokio::test]
async fn an_address_beyond_its_cap_is_refused() {
    let limits = PortLimits { address_max: Some(1), ..PortLimits::new(8) };
    let port = port(ServerConfig { port: limits, ..patient() }).await;
    let mut first = port.say(REQUEST).await;
    let mut answered = [0; 12];
    first.read_exact(&mut answered).await.unwrap();
    ended(port.open().await).await;
    drop(first);
}

/// Sends these bytes on connections of 127.0.0.1, which the server ends, until the address is distrusted.
async fn misbehave(port: &Port, says: &[u8]) {
    for _ in 0..32 {
        ended(port.say(says).await).await;
    }
}

#[tokio::test]
async fn an_address_with_many_silent_connections_is_served_at_a_low_priority() {
    let capped = PortLimits { address_max: Some(64), ..PortLimits::new(1024) };
    let port = port(ServerConfig { port: capped, opening_max: SHORT, ..patient() }).await;
    assert_eq!(port.niceness_for("127.0.0.1").await, niceness());
    misbehave(&port, b"").await;
    assert_eq!(port.niceness_for("127.0.0.1").await, niceness().max(10));
    assert_eq!(port.niceness_for("127.0.0.2").await, niceness());
}

#[tokio::test]
async fn an_address_that_breaks_the_protocol_is_served_at_a_low_priority() {
    let capped = PortLimits { address_max: Some(64), ..PortLimits::new(1024) };
    let port = port(ServerConfig { port: capped, ..patient() }).await;
    misbehave(&port, b"no such method or protocol at all\r\n\r\n").await;
    assert_eq!(port.niceness_for("127.0.0.1").await, niceness().max(10));
}

#[tokio::test]
async fn a_request_after_many_silent_connections_keeps_its_priority() {
    let capped = PortLimits { address_max: Some(512), ..PortLimits::new(1024) };
    let port = port(ServerConfig { port: capped, ..patient() }).await;
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(port.open().await);
    }
    // Only the opening is awaited at a low priority, not the request.
    assert_eq!(port.niceness_for("127.0.0.1").await, niceness());
}

#[tokio::test]
async fn an_address_with_short_lived_connections_keeps_its_priority() {
    let capped = PortLimits { address_max: Some(64), ..PortLimits::new(1024) };
    let mut port = port(ServerConfig { port: capped, ..patient() }).await;
    for _ in 0..32 {
        drop(port.open().await);
        drop(port.say(PREFACE).await);
        drop(port.hold().await);
    }
    assert_eq!(port.niceness_for("127.0.0.1").await, niceness());
}

#[tokio::test]
async fn closing_waits_for_requests_and_not_for_idle_connections() {
    let mut port = port(patient()).await;
    let mut idle = port.open().await;
    let mut busy = port.hold().await;
    let Port { release, _serving: serving, .. } = port;
    let closing = serving.close(LONG);
    let client = async {
        // The read ends with an end of stream or a reset.
        let _bytes = idle.read_to_end(&mut Vec::new()).await.is_ok();
        release.send_replace(true);
        let mut answer = Vec::new();
        busy.read_to_end(&mut answer).await.unwrap();
        Ok::<_, Infallible>(answer)
    };
    let (cut, answer) = tokio::join!(closing, client);
    assert_eq!(cut, 0);
    assert!(answer.unwrap().starts_with(b"HTTP/1.1 200"));
}

#[tokio::test]
async fn a_service_for_other_processes_refuses_web_pages() {
    let (listener, address) = listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let service = tower::service_fn(|_request: Request<ArrivingMessages<Incoming>>| async {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"here"))))
    });
    let _serving = serve_service(listener, patient(), service, tonic::Status::new);
    let ask = async |origin: Option<&str>| {
        let stream = TcpStream::connect(address).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let mut request = Request::builder().uri("/").header("host", "here");
        if let Some(origin) = origin {
            request = request.header("origin", origin);
        }
        sender.send_request(request.body(Empty::<Bytes>::new()).unwrap()).await.unwrap().status().as_u16()
    };
    assert_eq!(ask(None).await, 200);
    assert_eq!(ask(Some("http://attacker.example")).await, 403);
    assert_eq!(ask(Some("null")).await, 403);
}
