//! The process: ties itself to its worker, performs the handshake, and starts the other threads.

use std::fs;
use std::num::{NonZeroU32, NonZeroUsize};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use millrace_device::emulated::EmulatedGpu;
use millrace_device::{Device, MemoryExtent, StreamThreads, probe};
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{self as wire_messages, CopyRate, Hello, Ready};
use millrace_proto::frames::{FrameDecoder, ReceivedFrame};
use millrace_proto::{BUILD, OOM_SCORE_ADJ, PROTOCOL_VERSION};
use millrace_types::Bytes;
use rustix::process::{Resource, Rlimit, Signal};

use crate::control::{ControlFlow, ControlThread};
use crate::conversions::FrameDescriptors;
use crate::error::Error;
use crate::events::EventSender;
use crate::kept_outputs::KeptOutputs;
use crate::queue::WorkQueue;
use crate::{copies, runs};

/// Most programs loaded at a time. Each program has a descriptor and a few mappings.
pub const PROGRAMS_MAX: usize = 4096;

/// Memory that a process may use in addition to the size of the GPU's memory: for the graphs of its
/// programs, for threads, and for inputs and outputs in transit.
pub const MEMORY_BESIDE_GPU: Bytes = Bytes::gib(4);

/// Rounds of the copy measurement; the result is the median.
const PROBE_ROUNDS: NonZeroU32 = NonZeroU32::new(3).expect("not zero");

/// State that all threads share.
#[derive(Debug)]
pub(crate) struct ExecutorState<D: Device> {
    pub(crate) device: D,
    pub(crate) events: EventSender,
    /// Outputs that stay on the GPU after the run.
    pub(crate) kept: KeptOutputs<D::Value>,
    /// Whether the next run aborts the process: an injected fault.
    pub(crate) abort_on_run: AtomicBool,
}

/// Whether injected faults are carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultPolicy {
    Obeyed,
    Refused,
}

/// Serves the worker at the other end of `socket` until the worker sends a shutdown or ends.
///
/// The process dies with its worker: by a signal when the worker's thread that started the process
/// ends, and by the end of the socket. The caller must exit after this function returns: threads in
/// the middle of a launch are not awaited.
///
/// # Errors
/// Returns an [`Error`] if the socket fails, the worker breaks the protocol, or there is no worker.
pub fn run(socket: OwnedFd) -> Result<(), Error> {
    die_with_worker(&socket)?;
    raise_oom_score();
    raise_descriptor_limit();
    let mut decoder = FrameDecoder::default();
    let Some(frame) = decoder.recv_frame(&socket).map_err(Error::Socket)? else { return Ok(()) };
    let (Command::Hello(hello), mut descriptors) = command(frame)? else {
        return Err(Error::Protocol("another command came before Hello"));
    };
    if hello.protocol_version != PROTOCOL_VERSION {
        return Err(Error::Version { theirs: hello.protocol_version, build: hello.build });
    }
    let memory = descriptors.take(hello.device_memory_fd);
    let memory = memory.map_err(|_| Error::Protocol("Hello came without the GPU's memory"))?;
    let threads = NonZeroUsize::new(hello.threads as usize).unwrap_or(NonZeroUsize::MIN);
    limit_memory(Bytes(hello.device_memory_bytes));
    let gpu = EmulatedGpu::new(memory, Bytes(hello.device_memory_bytes), threads)?;
    serve(gpu, socket, decoder, &hello)
}

fn serve<D: Device>(device: D, socket: OwnedFd, decoder: FrameDecoder, hello: &Hello) -> Result<(), Error> {
    let events = EventSender::new(socket.try_clone().map_err(Error::Socket)?);
    let shared = Arc::new(ExecutorState {
        device,
        events,
        kept: KeptOutputs::new(),
        abort_on_run: AtomicBool::new(false),
    });
    let faults = if hello.allow_faults { FaultPolicy::Obeyed } else { FaultPolicy::Refused };
    let copy_rates = probe(&shared.device, hello.probe_bytes);
    let control = ControlThread::new(Arc::clone(&shared), faults);
    let _threads = WorkQueues::start(&shared, &control)?;
    shared.events.send(Event::Ready(Ready {
        protocol_version: PROTOCOL_VERSION,
        build: BUILD.to_owned(),
        pid: std::process::id(),
        incarnation: hello.incarnation,
        copy_rates,
    }));
    let stream = shared.device.stream(StreamThreads::One)?;
    shared.device.enter(stream, |stream| run_control_thread(control, stream, &socket, decoder))
}

/// Measures the rate of copies while the device is otherwise idle. A failed measurement only means
/// that the worker gets no rates.
fn probe<D: Device>(device: &D, bytes: u64) -> Vec<CopyRate> {
    if bytes == 0 {
        return Vec::new();
    }
    match probe::copy_rates(device, MemoryExtent { offset: 0, bytes }, PROBE_ROUNDS) {
        Ok(rates) => {
            let rate = |rate: probe::CopyRate| CopyRate { bytes: rate.bytes, bytes_per_s: rate.bytes_per_s };
            rates.into_iter().map(rate).collect()
        }
        Err(error) => {
            tracing::warn!(%error, "cannot measure the rate of copies");
            Vec::new()
        }
    }
}

/// Runs the control thread.
fn run_control_thread<D: Device>(
    mut control: ControlThread<D>,
    mut stream: D::Stream,
    socket: &OwnedFd,
    mut decoder: FrameDecoder,
) -> Result<(), Error> {
    while let Some(frame) = decoder.recv_frame(socket).map_err(Error::Socket)? {
        let (command, descriptors) = command(frame)?;
        if control.on_command(command, descriptors, &mut stream)? == ControlFlow::End {
            break;
        }
    }
    Ok(())
}

fn command(frame: ReceivedFrame) -> Result<(Command, FrameDescriptors), Error> {
    let message: wire_messages::Command = frame.decode()?;
    let command = message.command.ok_or(Error::Protocol("a command without content"))?;
    Ok((command, FrameDescriptors::new(frame.descriptors)))
}

/// The queues of the copy and run threads. Dropping this value closes the queues, so each thread ends
/// after the current work.
struct WorkQueues<D: Device> {
    copies: Arc<WorkQueue<copies::CopyWork<D>>>,
    copies_out: Arc<WorkQueue<copies::CopyWork<D>>>,
    runs: Arc<WorkQueue<runs::QueuedRun<D>>>,
}

impl<D: Device> WorkQueues<D> {
    fn start(shared: &Arc<ExecutorState<D>>, control: &ControlThread<D>) -> Result<Self, Error> {
        let threads =
            Self { copies: control.copies(), copies_out: control.copies_out(), runs: control.runs() };
        let stream = || shared.device.stream(StreamThreads::Whole);
        for (name, queue) in [("copies", control.copies()), ("copies out", control.copies_out())] {
            let shared = Arc::clone(shared);
            let stream = stream()?;
            spawn(name, move || copies::serve(&shared, &queue, stream))?;
        }
        spawn("runs", {
            let shared = Arc::clone(shared);
            let queue = control.runs();
            let stream = stream()?;
            move || shared.device.enter(stream, |stream| runs::serve(&shared, &queue, stream))
        })?;
        Ok(threads)
    }
}

impl<D: Device> Drop for WorkQueues<D> {
    fn drop(&mut self) {
        self.copies.close();
        self.copies_out.close();
        self.runs.close();
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let body = move || {
        let _guard = AbortOnPanic;
        body();
    };
    let thread = thread::Builder::new().name(name.to_owned()).spawn(body);
    // Not joined, because the thread ends with the process.
    thread.map(drop).map_err(|source| Error::Os { what: "start a thread", source })
}

/// Aborts the process if a thread panics. Without that thread, the executor would answer only some
/// commands; the worker can start a new incarnation instead.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}

/// Requests SIGKILL for the time when the worker ends. If the worker ended before this request, the
/// worker is no longer the parent process. The socket's peer credentials reveal the worker, because
/// the worker created the other end.
fn die_with_worker(socket: &OwnedFd) -> Result<(), Error> {
    let worker =
        rustix::net::sockopt::socket_peercred(socket.as_fd()).map_err(|e| Error::Socket(e.into()))?.pid;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|source| Error::Os { what: "tie this process to its worker", source: source.into() })?;
    if rustix::process::getppid() != Some(worker) {
        return Err(Error::Orphaned { worker: worker.as_raw_nonzero().get() });
    }
    Ok(())
}

/// Makes the kernel kill this process before the worker if the machine runs out of memory.
fn raise_oom_score() {
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ.to_string()) {
        tracing::warn!(%error, "cannot raise the OOM score: the kernel may kill the worker before this process if memory runs out");
    }
}

/// Limits the memory that this process allocates. rten cannot be stopped within an operator, and the
/// size of an operator's output is known only when it allocates memory. So a run that needs too much
/// memory ends this process, and no other process of the machine. A run that a real GPU could not
/// hold may also fail on an emulated GPU.
fn limit_memory(gpu: Bytes) {
    // RLIMIT_DATA counts private writable memory. The limit excludes the GPU's memory, which is shared with
    // the worker, and reserved address ranges.
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Data);
    let wanted = gpu.get().saturating_add(MEMORY_BESIDE_GPU.get());
    let limit = Some(maximum.map_or(wanted, |maximum| maximum.min(wanted)));
    let limit = Rlimit { current: limit, maximum: limit };
    if let Err(error) = rustix::process::setrlimit(Resource::Data, limit) {
        tracing::warn!(%error, "cannot limit the memory of this process");
    }
    // Core files are disabled, because a core file would contain the tensors of every function that ran here.
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    if let Err(error) = rustix::process::setrlimit(Resource::Core, none) {
        tracing::warn!(%error, "cannot disable core files: this process may write one when it dies");
    }
}

/// Raises the limit of open descriptors to the hard limit, because programs and large tensors need
/// descriptors.
fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, raised) {
        // If the limit is ever reached, loading fails with a clear message.
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
}
