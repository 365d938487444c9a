//! The port of an executor process: the start, the commands and the end of the process.

use std::ffi::OsString;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::Stdio;
use std::rc::Rc;
use std::sync::Arc;

use millrace_device::DeviceMemory;
use millrace_device::emulated::SmPage;
use millrace_gpu::ExecutorIsolation;
use millrace_proto::executor::{Command, Hello, command};
use millrace_proto::frames::SocketFrame;
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::{Bytes, GpuIndex, Incarnation};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::connection::ProcessConnection;
use super::device::ExecutorDevice;
use super::engine::ExecutorEngine;
use super::{stderr, watch};
use crate::port::{Descriptor, ExecutorPort, PortEvent, PortEventKind, PortSink, SharedDeviceMemory};

/// Maximum amount of a GPU's memory with which its first executor measures the rate of copies.
const PROBE_MAX: Bytes = Bytes::mib(4);

/// The worker's environment variables that an executor gets, besides those with the prefix
/// [`ALLOCATOR_VARIABLES`]. The first is for the dynamic loader, the second names the library of ONNX
/// Runtime, and the others are for the messages of panics.
/// Other variables may hold the operator's secrets, and an executor needs no others: the configuration
/// arrives over its socket.
const VARIABLES: [&str; 4] = ["LD_LIBRARY_PATH", "ORT_DYLIB_PATH", "RUST_BACKTRACE", "RUST_LIB_BACKTRACE"];
/// The prefix of the environment variables that tune the allocator.
const ALLOCATOR_VARIABLES: &str = "MIMALLOC_";

/// The command that starts an executor. The executor's socket is its standard input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecutorCommand {
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// Environment variables that each executor gets in addition to the few from its worker.
    pub envs: Vec<(OsString, OsString)>,
}

impl ExecutorCommand {
    /// Returns the present executable with the argument `executor`, which the `millrace` binary
    /// understands.
    ///
    /// # Errors
    /// The path of the present executable is unknown.
    pub fn this_program() -> std::io::Result<Self> {
        Ok(Self { program: std::env::current_exe()?, args: vec!["executor".into()], envs: Vec::new() })
    }
}

/// The settings of a worker's executor processes.
#[derive(Debug, Clone)]
pub(super) struct SpawnSettings {
    pub(super) command: ExecutorCommand,
    /// The memory of each GPU.
    pub(super) memory: Vec<Bytes>,
    /// The number of threads for the launches of an executor.
    pub(super) threads: u32,
    pub(super) allow_faults: bool,
    pub(super) isolation: ExecutorIsolation,
    pub(super) engine: ExecutorEngine,
    pub(super) device: ExecutorDevice,
}

/// The port of an executor process.
#[derive(Debug)]
pub(super) struct ProcessPort {
    settings: Arc<SpawnSettings>,
    gpu: GpuIndex,
    /// The memory that the process shares with the GPU's other processes in isolation. `None` for fresh
    /// memory at each start.
    lent: Option<SharedDeviceMemory>,
    sink: PortSink,
    process: Option<ExecutorProcess>,
    /// Whether the rate of the GPU's copies was measured, or cannot be measured.
    probed: bool,
}

#[derive(Debug)]
struct ExecutorProcess {
    incarnation: Incarnation,
    /// The memory of an emulated GPU. Without isolation the memory is dropped with the process, and its
    /// contents are never used again. `None` for a CUDA GPU, whose memory the process owns.
    memory: Option<SharedDeviceMemory>,
    connection: Rc<ProcessConnection>,
    // A pidfd refers to this process only, even after the process was reaped and its pid reused.
    pidfd: OwnedFd,
}

/// The reason why a process could not be started.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error("gpu {0} is not in the topology")]
    NoSuchGpu(GpuIndex),
    #[error("cannot allocate the emulated GPU's memory: {0}")]
    Memory(#[from] millrace_device::Error),
    #[error("the emulated GPU's memory cannot be shared ({0}): raise the limit of open files (ulimit -n)")]
    Descriptor(std::io::Error),
    #[error("cannot create the executor's socket: {0}")]
    Socket(std::io::Error),
    #[error("cannot start {}: {error}", program.display())]
    Spawn { program: PathBuf, error: std::io::Error },
    #[error("cannot send the greeting to the executor: {0}")]
    Hello(#[from] millrace_proto::frames::FrameError),
}

impl SpawnSettings {
    /// Returns the size of a GPU's memory.
    fn memory_bytes(&self, gpu: GpuIndex) -> Result<Bytes, StartError> {
        self.memory.get(gpu.0 as usize).copied().ok_or(StartError::NoSuchGpu(gpu))
    }

    /// Allocates the memory of an emulated GPU, filled with zeros.
    pub(super) fn device_memory(&self, gpu: GpuIndex) -> Result<SharedDeviceMemory, StartError> {
        let bytes = self.memory_bytes(gpu)?;
        let memory = DeviceMemory::create(&format!("millrace-gpu{gpu}"), bytes)?;
        let sms = SmPage::create(&format!("millrace-gpu{gpu}-sms"))?;
        Ok(SharedDeviceMemory { descriptor: Arc::new(memory.share()?), bytes, sms: Some(sms) })
    }
}

impl ProcessPort {
    /// Returns the port of a process with fresh memory at each start.
    pub(super) fn new(settings: Arc<SpawnSettings>, gpu: GpuIndex, sink: PortSink) -> Self {
        Self { settings, gpu, lent: None, sink, process: None, probed: false }
    }

    /// Returns the port of a process that shares memory with the GPU's other processes. The process does
    /// not measure copies, because a measurement would overwrite the models of other processes in the shared
    /// memory.
    pub(super) fn sharing(
        settings: Arc<SpawnSettings>,
        gpu: GpuIndex,
        lent: SharedDeviceMemory,
        sink: PortSink,
    ) -> Self {
        Self { settings, gpu, lent: Some(lent), sink, process: None, probed: true }
    }

    fn try_start(&mut self, incarnation: Incarnation) -> Result<(), StartError> {
        let (connection, theirs) = ProcessConnection::pair().map_err(StartError::Socket)?;
        let memory = match (&self.settings.device, &self.lent) {
            (ExecutorDevice::Cuda { .. }, _) => None,
            (ExecutorDevice::Emulated, Some(lent)) => Some(lent.clone()),
            (ExecutorDevice::Emulated, None) => Some(self.settings.device_memory(self.gpu)?),
        };
        connection.send(self.hello(incarnation, memory.as_ref())?)?;
        let command = &self.settings.command;
        let failed = |error| StartError::Spawn { program: command.program.clone(), error };
        let passed =
            |variable: &str| VARIABLES.contains(&variable) || variable.starts_with(ALLOCATOR_VARIABLES);
        let variables = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(passed));
        let mut child = tokio::process::Command::new(&command.program)
            .args(&command.args)
            .env_clear()
            .envs(variables)
            .envs(self.settings.device.variables(self.gpu))
            .envs(command.envs.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // A Ctrl-C in a terminal signals the whole process group, but executors must outlive the drain.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let pid = child.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed()));
        // The child was not waited for yet, so its pid cannot have been reused.
        let pid = pid.ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| failed(error.into()))?;
        if let Some(output) = child.stderr.take() {
            actix_rt::spawn(stderr::forward(output, self.gpu, incarnation));
        }
        self.probed = true;
        let connection = Rc::new(connection);
        let watch = watch::ExecutorWatch::new(self.gpu, incarnation, connection.clone(), self.sink.clone());
        actix_rt::spawn(watch.run(child));
        self.process = Some(ExecutorProcess { incarnation, memory, connection, pidfd });
        Ok(())
    }

    /// Returns the first frame of a connection.
    fn hello(
        &self,
        incarnation: Incarnation,
        memory: Option<&SharedDeviceMemory>,
    ) -> Result<SocketFrame, StartError> {
        let SpawnSettings { threads, allow_faults, engine, .. } = &*self.settings;
        let bytes = self.settings.memory_bytes(self.gpu)?;
        let hello = Hello {
            protocol_version: PROTOCOL_VERSION,
            build: BUILD.into(),
            incarnation: incarnation.0,
            gpu: self.gpu.0,
            device_memory_bytes: bytes.get(),
            device_memory_fd: 0,
            sm_page_fd: 1,
            threads: *threads,
            allow_faults: *allow_faults,
            // Only the first executor measures: requests that lost an executor wait for the next one.
            probe_bytes: if self.probed {
                0
            } else {
                PROBE_MAX.max(self.settings.device.block().get()).min(bytes).get()
            },
            late_seed: 0,
            device: self.settings.device.wire().into(),
            engine: engine.wire().into(),
        };
        let command = Command { command: Some(command::Command::Hello(hello)) };
        let mut descriptors = Vec::new();
        if let Some(memory) = memory {
            descriptors.push(memory.descriptor.try_clone().map_err(StartError::Descriptor)?);
            if let Some(sms) = &memory.sms {
                descriptors.push(sms.share()?);
            }
        }
        Ok(SocketFrame::new(&command, descriptors)?)
    }

    fn try_send(&self, command: command::Command, descriptors: &[Descriptor]) -> Result<(), SendError> {
        let Some(process) = &self.process else { return Ok(()) };
        let descriptors = descriptors.iter().map(|fd| fd.try_clone()).collect::<Result<_, _>>()?;
        let frame = SocketFrame::new(&Command { command: Some(command) }, descriptors)?;
        Ok(process.connection.send(frame)?)
    }
}

#[derive(Debug, thiserror::Error)]
enum SendError {
    #[error("a descriptor cannot be sent ({0}): raise the limit of open files (ulimit -n)")]
    Descriptor(#[from] std::io::Error),
    #[error(transparent)]
    Frame(#[from] millrace_proto::frames::FrameError),
}

impl ExecutorPort for ProcessPort {
    fn start(&mut self, incarnation: Incarnation) {
        if let Err(error) = self.try_start(incarnation) {
            self.process = None;
            let kind = PortEventKind::SpawnFailed { message: error.to_string() };
            self.sink.deliver(PortEvent { incarnation, kind });
        }
    }

    fn send(&mut self, command: command::Command, descriptors: Vec<Descriptor>) {
        if let Err(error) = self.try_send(command, &descriptors) {
            let incarnation = self.process.as_ref().map(|process| process.incarnation.0);
            tracing::error!(
                gpu = %self.gpu,
                incarnation,
                %error,
                "cannot send a command to an executor: the executor is killed"
            );
            self.kill();
        }
    }

    fn memory(&self) -> Option<SharedDeviceMemory> {
        self.process.as_ref()?.memory.clone()
    }

    fn kill(&mut self) {
        let Some(process) = &self.process else { return };
        match pidfd_send_signal(process.pidfd.as_fd(), Signal::KILL) {
            Ok(()) => {}
            // The process has ended already, and the end is reported.
            Err(rustix::io::Errno::SRCH) => {}
            Err(error) => tracing::error!(gpu = %self.gpu, %error, "cannot kill an executor"),
        }
    }
}

impl Drop for ProcessPort {
    fn drop(&mut self) {
        self.kill();
    }
}
