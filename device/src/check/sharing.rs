//! Checks 7, 8, 24 and 25: several processes on one GPU. The other processes are this program again,
//! with the name of a role.
#![allow(unsafe_code, reason = "queues work on memory that stays until the work is awaited")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

use crate::clock::monotonic_now;
use crate::cuda::driver::{AddressRange, MemoryHandle, PinnedBuffer};

use super::bench::{BLOCK, Bench, GpuBuffer, host_time};
use super::finding::{CheckError, Findings, micros, millis, rate};

/// Option of `gpu-check` that names a role.
const ROLE: &str = "--role";
/// Number of blocks that the checks pass between processes: 128 MiB.
const BLOCKS: u64 = 64;
/// Seed of the words in these blocks.
const SEED: u64 = 99;

/// Another process of a check. Dropping the value ends the process.
struct Other {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Other {
    /// Starts this program in a role. Standard input is a pipe, or this socket.
    fn start(role: &str, socket: Option<OwnedFd>) -> Result<Self, CheckError> {
        let input = socket.map_or_else(Stdio::piped, Stdio::from);
        let program = std::env::current_exe()?;
        let mut child =
            Command::new(program).args([ROLE, role]).stdin(input).stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take().expect("standard output is a pipe");
        Ok(Self { input: child.stdin.take(), output: BufReader::new(output), child })
    }

    /// Waits for a line.
    fn line(&mut self) -> Result<String, CheckError> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err(CheckError::Wrong("the other process ended early".to_owned()));
        }
        Ok(line.trim().to_owned())
    }

    /// Lets the other process go on.
    fn go_on(&mut self) -> Result<(), CheckError> {
        if let Some(input) = &mut self.input {
            input.write_all(b"\n")?;
        }
        Ok(())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.input.take());
        // An error means that the process has ended already.
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait().map(drop)) {
            eprintln!("gpu-check: {error}");
        }
    }
}

/// Plays a role in this process.
pub(super) fn play(role: &str) -> Result<(), CheckError> {
    match role.split_once('=').unwrap_or((role, "")) {
        ("reserve", hint) => reserve_at(hint),
        ("export", _) => export_blocks(),
        ("import", _) => import_blocks(),
        ("copy", _) => work_forever(true),
        ("kernel", _) => work_forever(false),
        _ => Err(CheckError::Wrong(format!("unknown role {role:?}"))),
    }
}

/// Prints a line for the process that started this one.
fn say(line: impl std::fmt::Display) -> Result<(), CheckError> {
    let mut output = std::io::stdout();
    writeln!(output, "{line}")?;
    output.flush()?;
    Ok(())
}

/// Waits until the process that started this one lets it go on, or ends.
fn await_input() -> Result<(), CheckError> {
    std::io::stdin().read_exact(&mut [0]).or(Ok(()))
}

/// Check 7: whether other processes get the same addresses for 16 GiB.
pub(super) fn hints(found: &mut Findings) -> Result<(), CheckError> {
    const PROCESSES: usize = 8;
    let _bench = Bench::new()?;
    let range = AddressRange::reserve(16 << 30, 0)?;
    let hint = range.base();
    let mut others: Vec<_> =
        (0..PROCESSES).map(|_| Other::start(&format!("reserve={hint}"), None)).collect::<Result<_, _>>()?;
    let mut granted = 0;
    for other in &mut others {
        let line = other.line()?;
        granted += usize::from(line == hint.to_string());
    }
    found.expect(
        "processes that got the same addresses",
        granted as f64,
        "of 8",
        PROCESSES as f64..=PROCESSES as f64,
    );
    Ok(())
}

fn reserve_at(hint: &str) -> Result<(), CheckError> {
    let hint = hint.parse().map_err(|_| CheckError::Wrong(format!("not an address: {hint:?}")))?;
    let _bench = Bench::new()?;
    let range = AddressRange::reserve(16 << 30, hint)?;
    say(range.base())?;
    await_input()
}

/// Check 8: the time to export and import blocks, and whether the bytes outlive the exporter.
pub(super) fn export(found: &mut Findings) -> Result<(), CheckError> {
    let bench = Bench::new()?;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let mut other = Other::start("export", Some(theirs))?;
    let exporting = other.line()?;
    let mut descriptors = Vec::new();
    while (descriptors.len() as u64) < BLOCKS {
        descriptors.extend(receive(&ours)?);
    }
    found.expect("export a block", number(&exporting)?, "µs", 5.0..=100.0);
    let (handles, time) = host_time(|| {
        let import = |descriptor: &OwnedFd| MemoryHandle::import(descriptor.as_fd(), BLOCK);
        descriptors.iter().map(import).collect::<Result<Vec<_>, _>>()
    })?;
    found.expect("import a block", micros(time) / BLOCKS as f64, "µs", 5.0..=100.0);
    let buffer = GpuBuffer::of(&bench.context, &handles)?;
    let wrong = bench.differing(buffer.base(), buffer.bytes(), SEED)?;
    found.expect("words that differ while the exporter lives", wrong as f64, "", 0.0..=0.0);
    drop(other);
    let after = bench.differing(buffer.base(), buffer.bytes(), SEED)?;
    found.expect("words that differ after the exporter was killed", after as f64, "", 0.0..=0.0);
    bench.write(&buffer, SEED + 1)?;
    let after = bench.differing(buffer.base(), buffer.bytes(), SEED + 1)?;
    found.expect("words that differ when written after that", after as f64, "", 0.0..=0.0);
    Ok(())
}

fn number(line: &str) -> Result<f64, CheckError> {
    line.parse().map_err(|_| CheckError::Wrong(format!("not a number: {line:?}")))
}

/// Sends descriptors in messages of 16.
fn send(socket: impl std::os::fd::AsFd, descriptors: &[OwnedFd]) -> Result<(), CheckError> {
    for group in descriptors.chunks(16) {
        let borrowed: Vec<BorrowedFd<'_>> = group.iter().map(std::os::fd::AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(CheckError::Wrong("the descriptors do not fit".to_owned()));
        }
        let parts = [std::io::IoSlice::new(b"handles")];
        rustix::net::sendmsg(&socket, &parts, &mut control, SendFlags::empty())?;
    }
    Ok(())
}

fn receive(socket: impl std::os::fd::AsFd) -> Result<Vec<OwnedFd>, CheckError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 16];
    let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
    let got = rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if got.bytes == 0 {
        return Err(CheckError::Wrong("the other process ended early".to_owned()));
    }
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    Ok(descriptors)
}

fn export_blocks() -> Result<(), CheckError> {
    let bench = Bench::new()?;
    let handles: Vec<_> =
        (0..BLOCKS).map(|_| MemoryHandle::create(bench.gpu(), BLOCK)).collect::<Result<_, _>>()?;
    let buffer = GpuBuffer::of(&bench.context, &handles)?;
    bench.write(&buffer, SEED)?;
    let (descriptors, time) =
        host_time(|| handles.iter().map(MemoryHandle::export).collect::<Result<Vec<_>, _>>())?;
    say(micros(time) / BLOCKS as f64)?;
    send(std::io::stdin(), &descriptors)?;
    // Until the other process closes the socket or kills this one.
    rustix::net::recv(std::io::stdin(), &mut [0_u8; 1][..], RecvFlags::empty())?;
    Ok(())
}

/// Check 24: a second process reads the weights of the first: memory and copies over PCIe.
pub(super) fn shared_weights(found: &mut Findings) -> Result<(), CheckError> {
    const WEIGHTS: u64 = 2 << 30;
    let bench = Bench::new()?;
    let handles: Vec<_> =
        (0..WEIGHTS / BLOCK).map(|_| MemoryHandle::create(bench.gpu(), BLOCK)).collect::<Result<_, _>>()?;
    let buffer = GpuBuffer::of(&bench.context, &handles)?;
    bench.write(&buffer, SEED)?;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let mut other = Other::start("import", Some(theirs))?;
    // The other process's context is open: what it takes more comes from the import.
    let opened = other.line()?;
    let (before, _) = bench.context.memory()?;
    let descriptors: Vec<_> = handles.iter().map(MemoryHandle::export).collect::<Result<_, _>>()?;
    let began = monotonic_now();
    send(&ours, &descriptors)?;
    let wrong = other.line()?;
    let time = monotonic_now().since(began);
    let (after, _) = bench.context.memory()?;
    found.note(format!("the other process {opened}"));
    found.value("until the other process has read 2 GiB of weights", millis(time), "ms");
    found.expect("words that differ in the other process", number(&wrong)?, "", 0.0..=0.0);
    let more = before.saturating_sub(after).get() as f64 / (1 << 20) as f64;
    found.expect("memory that the second process takes for the weights", more, "MiB", 0.0..=64.0);
    let copy = GpuBuffer::new(&bench, WEIGHTS)?;
    // SAFETY: the buffers stay until the work is awaited.
    let time = bench.gpu_time(&bench.stream, 5, || unsafe {
        bench.stream.copy_on_gpu(copy.base(), buffer.base(), WEIGHTS)
    })?;
    found.expect("copies within the GPU, bytes copied", rate(WEIGHTS, time) / 1e3, "TB/s", 1.0..=2.2);
    Ok(())
}

fn import_blocks() -> Result<(), CheckError> {
    let bench = Bench::new()?;
    say("has a context of its own")?;
    let mut handles = Vec::new();
    while handles.len() < 1024 {
        for descriptor in receive(std::io::stdin())? {
            handles.push(MemoryHandle::import(descriptor.as_fd(), BLOCK)?);
        }
    }
    let buffer = GpuBuffer::of(&bench.context, &handles)?;
    say(bench.differing(buffer.base(), buffer.bytes(), SEED)?)?;
    rustix::net::recv(std::io::stdin(), &mut [0_u8; 1][..], RecvFlags::empty())?;
    Ok(())
}

/// Check 25: how long the memory and the descriptors of a killed process stay.
pub(super) fn killed(found: &mut Findings) -> Result<(), CheckError> {
    let bench = Bench::new()?;
    for (role, work) in [("copy", "in a copy"), ("kernel", "in a kernel")] {
        let (before, _) = bench.context.memory()?;
        let mut other = Other::start(role, None)?;
        other.line()?;
        let (during, _) = bench.context.memory()?;
        let began = monotonic_now();
        other.child.kill()?;
        // The pipe ends when the kernel has closed the descriptors of the process.
        let mut rest = Vec::new();
        other.output.read_to_end(&mut rest)?;
        let closed = monotonic_now().since(began);
        other.child.wait()?;
        let waited = monotonic_now().since(began);
        let limit = Duration::from_secs(20);
        let freed = loop {
            let (now, _) = bench.context.memory()?;
            let time = monotonic_now().since(began);
            if now.get() + (64 << 20) >= before.get() || time > limit {
                break time;
            }
        };
        let taken = before.saturating_sub(during).get() as f64 / (1 << 20) as f64;
        found.value(format!("killed {work}: memory that it held"), taken, "MiB");
        found.expect(format!("killed {work}: until its pipe ended"), millis(closed), "ms", 0.0..=1000.0);
        found.expect(format!("killed {work}: until it was gone"), millis(waited), "ms", 0.0..=1500.0);
        found.expect(format!("killed {work}: until its memory was free"), millis(freed), "ms", 0.0..=2000.0);
        other.go_on().or(Ok::<(), CheckError>(()))?;
    }
    Ok(())
}

/// Takes 4 GiB, and works until the process is killed.
fn work_forever(copies: bool) -> Result<(), CheckError> {
    let bench = Bench::new()?;
    let buffer = GpuBuffer::new(&bench, 4 << 30)?;
    let host = PinnedBuffer::new(256 << 20)?;
    say("works")?;
    for _ in 0..100_000 {
        if copies {
            // SAFETY: the buffers stay until the stream is awaited.
            unsafe { bench.stream.copy_to_gpu(buffer.base(), host.as_slice())? };
        } else {
            bench.kernels.spin(&bench.stream, Duration::from_millis(50))?;
        }
        bench.stream.synchronize()?;
    }
    Ok(())
}
