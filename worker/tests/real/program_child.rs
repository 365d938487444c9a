//! The function that the tests' processes run: this test program as a user's program.

use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use millrace_function::{Buffer, Call, DataId, DataType, Error};
use millrace_proto::frames::{FrameQueue, SocketFrame};
use millrace_proto::function::from_process::Message as Said;
use millrace_proto::{FUNCTION_PROTOCOL_VERSION, function};
use millrace_types::{Epoch, NodeName};

use crate::support::FUNCTION_VARIABLE;

/// Size of large data, which does not travel inside messages.
pub(crate) const LARGE: usize = 3 << 20;

/// Serves calls. The input `what` names the action, and `x` is its data.
pub(crate) fn be_a_function() {
    match std::env::var(FUNCTION_VARIABLE).as_deref() {
        Ok("flood") => flood(),
        _ => millrace_function::serve(obey).unwrap(),
    }
}

/// Greets, requests names, and never reads.
fn flood() {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let mut outbox = FrameQueue::default();
    let ready = function::Ready { protocol_version: FUNCTION_PROTOCOL_VERSION, ..Default::default() };
    let said = [Said::Ready(ready)].into_iter().chain(std::iter::repeat(Said::TakeIds(function::TakeIds {})));
    for message in said {
        let message = function::FromProcess { message: Some(message) };
        outbox.push(SocketFrame::new(&message, Vec::new()).unwrap()).unwrap();
        outbox.flush(&socket).unwrap();
    }
}

fn obey(call: &Call) -> Result<(), Error> {
    let what = call.fetch(&call.input("what")?.id)?;
    let what = String::from_utf8_lossy(what.bytes()?).into_owned();
    let x = call.fetch(&call.input("x")?.id)?;
    let mut words = what.split_whitespace();
    let word = words.next().unwrap_or_default();
    match word {
        "die" => std::process::abort(),
        // Aborts once: the file records that it has.
        "die-once" => {
            let marker = Path::new(words.next().unwrap());
            if !marker.exists() {
                std::fs::write(marker, "").unwrap();
                std::process::abort();
            }
        }
        // Reports that it has begun, and aborts when the test says so; the next process does not
        // abort.
        "die-when-told" => {
            let begun = Path::new(words.next().unwrap());
            let told = Path::new(words.next().unwrap());
            if !begun.exists() {
                std::fs::write(begun, "").unwrap();
                while !told.exists() {
                    std::thread::yield_now();
                }
                std::process::abort();
            }
        }
        "hang" => loop {
            std::thread::park();
        },
        // The child writes its pid and keeps running.
        "start" => {
            let script =
                format!("echo $$ > {0}.tmp && mv {0}.tmp {0}; exec sleep 1000", words.next().unwrap());
            #[allow(clippy::zombie_processes, reason = "it is to be killed with this one")]
            let _child = std::process::Command::new("/bin/sh").args(["-c", &script]).spawn().unwrap();
            loop {
                std::thread::park();
            }
        }
        // The kernel lacks memory for this output, so no byte of it is written.
        "sparse" => {
            let id = call.unique_id()?;
            call.store(&id, call.create(1 << 40)?)?;
            return call.output("y", &id, DataType::Uint8, &[1 << 40]);
        }
        // Answers the name of the data that it stored.
        "name" => {
            let id = call.unique_id()?;
            let mut kept = call.create(x.len())?;
            kept.copy_from_slice(x.bytes()?);
            call.store(&id, kept)?;
            return answer(call, id.to_string().as_bytes());
        }
        // Stores data under the name in `x`.
        "take" => {
            let id = named(&x)?;
            call.store(&id, call.create(1)?)
                .map_err(|it| Error::Function(format!("{}: {it}", it.reason())))?;
            return answer(call, b"stored");
        }
        // Fetches the data with the name in `x`.
        "find" => {
            let found =
                call.fetch(&named(&x)?).map_err(|it| Error::Function(format!("{}: {it}", it.reason())))?;
            return answer(call, found.bytes()?);
        }
        "refuse" => return Err(Error::Function("not today".into())),
        "forget" => return Ok(()),
        "scribble" => return answer(call, scribble().as_bytes()),
        // Answers an input unchanged.
        "hand-on" => {
            let id = call.input("x")?.id.clone();
            return call.output("y", &id, DataType::Uint8, &[x.len() as i64]);
        }
        _ => {}
    }
    let mut y = call.create(if word == "pid" { 4 } else { x.len() })?;
    if word == "pid" {
        y.copy_from_slice(&std::process::id().to_le_bytes());
    } else {
        y.iter_mut().zip(x.bytes()?).for_each(|(to, from)| *to = from.wrapping_add(1));
    }
    let id = call.unique_id()?;
    let shape = [y.len() as i64];
    call.store(&id, y)?;
    // Stored data is found again in place.
    assert_eq!(call.fetch(&id)?.len() as i64, shape[0]);
    if word == "mistype" {
        return call.output("y", &id, DataType::Int8, &shape);
    }
    if word == "twice" {
        call.output("z", &id, DataType::Uint8, &shape)?;
    }
    if word == "respond" {
        return call.response("y", &id, DataType::Uint8, &shape);
    }
    call.output("y", &id, DataType::Uint8, &shape)
}

fn answer(call: &Call, data: &[u8]) -> Result<(), Error> {
    let id = call.unique_id()?;
    let mut room = call.create(data.len())?;
    room.copy_from_slice(data);
    call.store(&id, room)?;
    call.response("y", &id, DataType::Uint8, &[data.len() as i64])
}

/// Returns whether this process has memory from its worker, and the changes that it could make to
/// the memory.
fn scribble() -> String {
    let mut has = false;
    let mut done = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        let target = std::fs::read_link(&path).unwrap_or_default();
        if !target.to_string_lossy().starts_with("/memfd:millrace") {
            continue;
        }
        // Opening the file again bypasses the rights of the descriptor.
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        let tried = [
            ("write", file.write_all_at(b"x", 0)),
            ("cut", file.set_len(1)),
            ("grow", file.set_len(2 * LARGE as u64)),
        ];
        has = true;
        done.extend(tried.into_iter().filter_map(|(what, tried)| tried.is_ok().then_some(what)));
    }
    format!("{has} {done:?}")
}

/// Parses the name of data.
fn named(text: &Buffer) -> Result<DataId, Error> {
    let text = String::from_utf8_lossy(text.bytes()?).into_owned();
    let words: Vec<_> = text.split('/').collect();
    let [home, epoch, counter] = words[..] else { return Err(Error::NotAnId(text)) };
    let home = NodeName::new(home).unwrap();
    Ok(DataId { home, epoch: Epoch(epoch.parse().unwrap()), counter: counter.parse().unwrap() })
}
