//! Measures a program's calls to its worker (D10: under 50 us at the median). A store and a fetch
//! of a small tensor cross the socket and the worker's objects. These calls alternate with a round
//! trip over a plain Unix socket between two processes, in the same run. The bench prints and
//! asserts nothing: `cargo bench -p millrace-worker --bench functions`.
//!
//! The executor, the program and the other end of the plain socket are this program started again.

#![allow(clippy::unwrap_used, reason = "a measurement that meets the unexpected ends")]
#![allow(dead_code, reason = "the tests use more of what they share")]

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use millrace_device::monotonic_now;
use millrace_function::{Call, DataId, DataType, Error};
use millrace_model::program::PackedProgram;
use millrace_proto::worker as wire;
use millrace_types::workflow::Signature;
use millrace_types::{Dim, TensorSpec};
use millrace_worker::start::{WorkerConfig, start};

#[path = "../tests/real/controller.rs"]
mod controller;
#[path = "../tests/real/ledger.rs"]
mod ledger;
#[path = "../tests/real/support.rs"]
mod support;

use controller::Controller;
use support::{all_up, client, config, launcher, request, script};

/// Number of calls of each kind in each round.
const CALLS: usize = 2_000;
const ROUNDS: usize = 5;
/// Size of a small tensor: 64 floats.
const SMALL: usize = 256;
const ECHO_VARIABLE: &str = "MILLRACE_BENCH_ECHO";

fn main() {
    let is = |variable| std::env::var_os(variable).is_some();
    if is(ECHO_VARIABLE) {
        echo();
    } else if is(support::FUNCTION_VARIABLE) {
        let mut last = Vec::new();
        millrace_function::serve(|call| measure(call, &mut last)).unwrap();
    } else if is(support::LAUNCHER_VARIABLE) {
        let code = millrace_worker::programs::launch();
        panic!("the launcher did not become a program: {code:?}");
    } else if is(support::EXECUTOR_VARIABLE) {
        support::be_an_executor();
    } else {
        tokio::runtime::Runtime::new().unwrap().block_on(compare());
    }
}

/// Serves as the other end of the plain socket.
fn echo() {
    let mut socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut data = [0; SMALL];
    while socket.read_exact(&mut data).is_ok() {
        socket.write_all(&data).unwrap();
    }
}

/// Runs inside the program: times each store, and each fetch of data that an earlier request
/// stored.
fn measure(call: &Call, last: &mut Vec<DataId>) -> Result<(), Error> {
    let timed = |work: &mut dyn FnMut() -> Result<(), Error>| {
        let began = monotonic_now();
        work()?;
        Ok::<u64, Error>(u64::try_from(monotonic_now().since(began).as_nanos()).unwrap())
    };
    let mut stores = Vec::new();
    let mut fetches = Vec::new();
    let mut ids = Vec::new();
    for at in 0..CALLS {
        stores.push(timed(&mut || {
            let id = call.unique_id()?;
            let mut room = call.create(SMALL)?;
            room[0] = at as u8;
            call.store(&id, room)?;
            ids.push(id);
            Ok(())
        })?);
    }
    for id in &*last {
        fetches.push(timed(&mut || call.fetch(id)?.bytes().map(|bytes| assert_eq!(bytes.len(), SMALL)))?);
    }
    *last = ids;
    for (name, times) in [("store", stores), ("fetch", fetches)] {
        let times = if times.is_empty() { vec![0] } else { times };
        let mut room = call.create(times.len() * 8)?;
        room.chunks_exact_mut(8).zip(&times).for_each(|(to, time)| to.copy_from_slice(&time.to_le_bytes()));
        let id = call.unique_id()?;
        call.store(&id, room)?;
        call.output(name, &id, DataType::Uint64, &[times.len() as i64])?;
    }
    Ok(())
}

fn packed() -> Vec<u8> {
    let tensor = |name: &str, datatype| TensorSpec {
        name: name.into(),
        datatype,
        shape: vec![Dim::Symbol(format!("{name}.0"))],
    };
    let outputs = ["store", "fetch"].map(|name| tensor(name, DataType::Uint64)).to_vec();
    let declared = Signature { inputs: vec![tensor("x", DataType::Uint8)], outputs };
    PackedProgram { signature: declared, file: script().into() }.pack().unwrap().to_vec()
}

async fn compare() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let config = WorkerConfig { programs: Some(launcher()), ..config(dir.path(), &[controller.addr], 1) };
    let worker = start(config).await.unwrap();
    all_up(&controller).await;
    let digest = controller.publish(&packed());
    controller.desire(&[("f", digest)]);
    controller.ready("f").await;
    let mut client = client(&worker);
    let x = wire::InferTensor {
        name: "x".into(),
        datatype: "UINT8".into(),
        shape: vec![1],
        data: bytes::Bytes::from_static(b"x"),
        parts: Vec::new(),
    };
    let mut plain = Vec::new();
    let mut stores = Vec::new();
    let mut fetches = Vec::new();
    for round in 0..=ROUNDS {
        let once = tokio::task::spawn_blocking(round_trips).await.unwrap();
        let asked = wire::InvokeRequest { inputs: vec![x.clone()], ..request("f", round as u64, &[]) };
        let answer = client.invoke(asked).await.unwrap().into_inner();
        // The first round has nothing to fetch and runs cold, so the round is not counted.
        if round > 0 {
            plain.extend(once);
            stores.extend(times(&answer.outputs[0].data));
            fetches.extend(times(&answer.outputs[1].data));
        }
    }
    show("plain Unix socket, there and back", &mut plain);
    show("store", &mut stores);
    show("fetch", &mut fetches);
    let mut both: Vec<u64> = stores.iter().zip(&fetches).map(|(a, b)| a + b).collect();
    show("store and fetch (at equal ranks)", &mut both);
    worker.shutdown().await;
}

fn round_trips() -> Vec<u64> {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(ECHO_VARIABLE, "1")
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
        .spawn()
        .unwrap();
    let mut data = [7; SMALL];
    let mut once = || {
        let began = monotonic_now();
        ours.write_all(&data).unwrap();
        ours.read_exact(&mut data).unwrap();
        u64::try_from(monotonic_now().since(began).as_nanos()).unwrap()
    };
    let times = (0..CALLS).map(|_| once()).collect();
    drop(ours);
    child.wait().unwrap();
    times
}

fn times(data: &[u8]) -> impl Iterator<Item = u64> {
    data.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()))
}

fn show(what: &str, times: &mut [u64]) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize] as f64 / 1e3;
    println!("{what:<36} p50 {:>7.1} us   p99 {:>7.1} us   ({} times)", at(0.5), at(0.99), times.len());
}
