//! The process: ties itself to its worker, performs the handshake, starts the other threads, and carries
//! out commands until the worker ends.

mod control;
mod limits;
mod threads;

use std::num::{NonZeroU32, NonZeroUsize};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use millrace_device::cuda::CudaGpu;
use millrace_device::emulated::{EmulatedGpu, SmPage};
use millrace_device::{Device, MemoryExtent, probe};
use millrace_engine::ort::OrtEngine;
use millrace_engine::rten::RtenEngine;
use millrace_engine::{Engine, LaunchThreads};
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{self as wire_messages, CopyRate, Hello, Ready};
use millrace_proto::frames::{FrameDecoder, ReceivedFrame};
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::Bytes;

pub use control::PROGRAMS_MAX;
pub use limits::MEMORY_BESIDE_GPU;

use crate::error::Error;
use crate::memory::executor_state::ExecutorState;
use crate::memory::kept_outputs::KeptOutputs;
use crate::process::control::{ControlFlow, ControlThread, FaultPolicy};
use crate::process::limits::{die_with_worker, limit_memory, raise_descriptor_limit, raise_oom_score};
use crate::process::threads::WorkQueues;
use crate::socket::conversions::FrameDescriptors;
use crate::socket::events::EventSender;

/// Rounds of the copy measurement; the result is the median.
const PROBE_ROUNDS: NonZeroU32 = NonZeroU32::new(3).expect("not zero");

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
    let bytes = Bytes(hello.device_memory_bytes);
    limit_memory(bytes);
    let threads = NonZeroUsize::new(hello.threads as usize).unwrap_or(NonZeroUsize::MIN);
    match (hello.device(), hello.engine()) {
        (wire_messages::Device::Cuda, wire_messages::Engine::Ort) => {
            serve(OrtEngine::new(CudaGpu::open(bytes)?, threads)?, socket, decoder, &hello)
        }
        (wire_messages::Device::Emulated, engine) => {
            let memory = descriptors.take(hello.device_memory_fd);
            let memory = memory.map_err(|_| Error::Protocol("Hello came without the GPU's memory"))?;
            let mut gpu = EmulatedGpu::new(memory, bytes)?;
            if hello.sm_page_fd != 0 {
                let page = descriptors.take(hello.sm_page_fd);
                let page = page.map_err(|_| Error::Protocol("Hello came without the GPU's SM page"))?;
                gpu = gpu.with_sms(SmPage::open(page)?);
            }
            if hello.allow_faults && hello.late_seed != 0 {
                gpu = gpu.with_late_work(hello.late_seed);
            }
            match engine {
                wire_messages::Engine::Rten => serve(RtenEngine::new(gpu, threads), socket, decoder, &hello),
                wire_messages::Engine::Ort => serve(OrtEngine::new(gpu, threads)?, socket, decoder, &hello),
                wire_messages::Engine::Unspecified => {
                    Err(Error::Protocol("Hello names no engine of this build"))
                }
            }
        }
        (wire_messages::Device::Cuda, _) => {
            Err(Error::Protocol("Hello names an engine that cannot use CUDA"))
        }
        (wire_messages::Device::Unspecified, _) => {
            Err(Error::Protocol("Hello names no device of this build"))
        }
    }
}

fn serve<E: Engine>(engine: E, socket: OwnedFd, decoder: FrameDecoder, hello: &Hello) -> Result<(), Error> {
    let events = EventSender::new(socket.try_clone().map_err(Error::Socket)?);
    let shared = Arc::new(ExecutorState {
        engine,
        events,
        kept: KeptOutputs::new(),
        abort_on_run: AtomicBool::new(false),
    });
    let faults = if hello.allow_faults { FaultPolicy::Obeyed } else { FaultPolicy::Refused };
    let copy_rates = probe(shared.device(), hello.probe_bytes);
    let control = ControlThread::new(Arc::clone(&shared), faults)?;
    let _threads = WorkQueues::start(&shared, &control)?;
    shared.events.send(Event::Ready(Ready {
        protocol_version: PROTOCOL_VERSION,
        build: BUILD.to_owned(),
        pid: std::process::id(),
        incarnation: hello.incarnation,
        copy_rates,
    }));
    let launches = shared.engine.queue(LaunchThreads::One)?;
    shared.engine.enter(launches, |launches| run_control_thread(control, launches, &socket, decoder))
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
fn run_control_thread<E: Engine>(
    mut control: ControlThread<E>,
    mut launches: E::Queue,
    socket: &OwnedFd,
    mut decoder: FrameDecoder,
) -> Result<(), Error> {
    while let Some(frame) = decoder.recv_frame(socket).map_err(Error::Socket)? {
        let (command, descriptors) = command(frame)?;
        if control.on_command(command, descriptors, &mut launches)? == ControlFlow::End {
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
