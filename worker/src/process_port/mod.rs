//! Real executor processes behind the [`ExecutorPort`] seam.
//!
//! A process is started from the actor thread, which lives as long as the worker: the executor's
//! parent-death signal follows the thread that forked it. Its socket is its standard input, because
//! that is the one descriptor a child can be given without a moment in which another child, forked
//! at the same time, would inherit it too: then the end of this worker would not close it.
//! Everything else we open is close-on-exec.
//!
//! One process per GPU, or per model that a GPU was asked for (`isolated`).
//!
//! One task per process reads its events, waits for its end and reports it. All of it runs on the
//! actor thread: an event costs no hop between threads.

use std::ffi::OsString;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::Stdio;
use std::rc::Rc;
use std::sync::Arc;

use millrace_device::DeviceMemory;
use millrace_policy::gpu::Isolation;
use millrace_proto::executor::{Command, Hello, command};
use millrace_proto::frames::Frame;
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::topology::Topology;
use millrace_types::{Bytes, GpuIndex, Incarnation};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::port::isolating::IsolatingPort;
use crate::port::{Descriptor, ExecutorPort, Lent, PortEvent, PortEventKind, PortSink, Spawner};
use connection::Connection;

pub(crate) mod connection;
mod isolated;
pub(crate) mod stderr;
mod watch;

/// What of a GPU's memory its first executor measures copies with.
const PROBE_MAX: Bytes = Bytes::mib(4);

/// The worker's variables that an executor has too, and those whose names begin with
/// [`ALLOCATOR_VARIABLES`]. All others may be the operator's secrets, and no executor reads them: an executor
/// is told all that it needs over its socket. The first is for the loader, the others for messages of panics.
const VARIABLES: [&str; 3] = ["LD_LIBRARY_PATH", "RUST_BACKTRACE", "RUST_LIB_BACKTRACE"];
/// How the allocator is tuned.
const ALLOCATOR_VARIABLES: &str = "MIMALLOC_";

/// The program that is an executor. It finds its socket as its standard input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecutorCommand {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Variables that each executor has beside the few that it has from its worker.
    pub envs: Vec<(OsString, OsString)>,
}

impl ExecutorCommand {
    /// This program with the argument `executor`: what `millrace` understands.
    ///
    /// # Errors
    /// When the operating system does not tell which program this is.
    pub fn this_program() -> std::io::Result<Self> {
        Ok(Self { program: std::env::current_exe()?, args: vec!["executor".into()], envs: Vec::new() })
    }
}

/// What every executor of a worker is started with.
#[derive(Debug)]
pub struct ProcessSpawner(Arc<Settings>);

#[derive(Debug)]
struct Settings {
    command: ExecutorCommand,
    memory: Vec<Bytes>,
    threads: u32,
    allow_faults: bool,
    isolation: Isolation,
}

impl ProcessSpawner {
    /// Starts `command` for each GPU of the topology, with its memory. `threads` is what the
    /// launches of one executor may use.
    #[must_use]
    pub fn new(command: ExecutorCommand, topology: &Topology, threads: u32, allow_faults: bool) -> Self {
        let memory = topology.gpus.iter().map(|gpu| gpu.memory).collect();
        let isolation = Isolation::default();
        Self(Arc::new(Settings { command, memory, threads, allow_faults, isolation }))
    }

    /// The same with the processes of a GPU shared by its models, or not.
    #[must_use]
    pub fn with_isolation(self, isolation: Isolation) -> Self {
        let Settings { command, memory, threads, allow_faults, .. } = &*self.0;
        let (command, memory) = (command.clone(), memory.clone());
        let (threads, allow_faults) = (*threads, *allow_faults);
        Self(Arc::new(Settings { command, memory, threads, allow_faults, isolation }))
    }
}

impl Spawner for ProcessSpawner {
    fn port(&mut self, gpu: GpuIndex, sink: PortSink) -> Box<dyn ExecutorPort> {
        let settings = self.0.clone();
        if settings.isolation.per_model() {
            return Box::new(IsolatingPort::new(isolated::Processes::new(settings, gpu), sink));
        }
        Box::new(ProcessPort { settings, gpu, lent: None, sink, process: None, probed: false })
    }
}

/// An executor process.
#[derive(Debug)]
struct ProcessPort {
    settings: Arc<Settings>,
    gpu: GpuIndex,
    /// The memory that it shares with others of its GPU; else each start has its own.
    lent: Option<Lent>,
    sink: PortSink,
    process: Option<Process>,
    /// Whether its GPU's copies were measured, or cannot be.
    probed: bool,
}

#[derive(Debug)]
struct Process {
    incarnation: Incarnation,
    /// Where it is the GPU's only one, what it leaves there is never seen again.
    memory: Lent,
    connection: Rc<Connection>,
    // Names this process and never another one, even after it was reaped.
    pidfd: OwnedFd,
}

/// Why no process could be started.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("gpu {0} is not in the topology")]
    NoSuchGpu(GpuIndex),
    #[error("the emulated GPU's memory: {0}")]
    Memory(#[from] millrace_device::Error),
    #[error("the emulated GPU's memory cannot be shared ({0}): raise the limit of open files (ulimit -n)")]
    Descriptor(std::io::Error),
    #[error("its socket: {0}")]
    Socket(std::io::Error),
    #[error("{}: {error}", program.display())]
    Spawn { program: PathBuf, error: std::io::Error },
    #[error("its greeting: {0}")]
    Hello(#[from] millrace_proto::frames::Error),
}

impl Settings {
    /// New memory of a GPU, all zeros.
    fn device_memory(&self, gpu: GpuIndex) -> Result<Lent, StartError> {
        let bytes = self.memory.get(gpu.0 as usize).copied().ok_or(StartError::NoSuchGpu(gpu))?;
        let memory = DeviceMemory::create(&format!("millrace-gpu{gpu}"), bytes)?;
        Ok(Lent { descriptor: Arc::new(memory.share()?), bytes })
    }
}

impl ProcessPort {
    fn try_start(&mut self, incarnation: Incarnation) -> Result<(), StartError> {
        let (connection, theirs) = Connection::pair().map_err(StartError::Socket)?;
        let memory = match &self.lent {
            Some(lent) => lent.clone(),
            None => self.settings.device_memory(self.gpu)?,
        };
        connection.send(self.hello(incarnation, &memory)?)?;
        let command = &self.settings.command;
        let failed = |error| StartError::Spawn { program: command.program.clone(), error };
        let passed =
            |variable: &str| VARIABLES.contains(&variable) || variable.starts_with(ALLOCATOR_VARIABLES);
        let variables = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(passed));
        let mut child = tokio::process::Command::new(&command.program)
            .args(&command.args)
            .env_clear()
            .envs(variables)
            .envs(command.envs.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // Ctrl-C in a terminal goes to the whole group: executors must outlive the drain.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let pid = child.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed()));
        // The child is ours and was not waited for, so its pid is still its own.
        let pid = pid.ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| failed(error.into()))?;
        if let Some(output) = child.stderr.take() {
            actix_rt::spawn(stderr::forward(output, self.gpu, incarnation));
        }
        self.probed = true;
        let connection = Rc::new(connection);
        let watch = watch::Watch::new(self.gpu, incarnation, connection.clone(), self.sink.clone());
        actix_rt::spawn(watch.run(child));
        self.process = Some(Process { incarnation, memory, connection, pidfd });
        Ok(())
    }

    /// The first frame.
    fn hello(&self, incarnation: Incarnation, memory: &Lent) -> Result<Frame, StartError> {
        let Settings { threads, allow_faults, .. } = &*self.settings;
        let hello = Hello {
            protocol_version: PROTOCOL_VERSION,
            build: BUILD.into(),
            incarnation: incarnation.0,
            gpu: self.gpu.0,
            device_memory_bytes: memory.bytes.get(),
            device_memory_fd: 0,
            threads: *threads,
            allow_faults: *allow_faults,
            // Only once: the next one is waited for by those who lost this one.
            probe_bytes: if self.probed { 0 } else { PROBE_MAX.min(memory.bytes).get() },
        };
        let command = Command { command: Some(command::Command::Hello(hello)) };
        let memory = memory.descriptor.try_clone().map_err(StartError::Descriptor)?;
        Ok(Frame::new(&command, vec![memory])?)
    }

    fn try_send(&self, command: command::Command, descriptors: &[Descriptor]) -> Result<(), SendError> {
        let Some(process) = &self.process else { return Ok(()) };
        let descriptors = descriptors.iter().map(|fd| fd.try_clone()).collect::<Result<_, _>>()?;
        let frame = Frame::new(&Command { command: Some(command) }, descriptors)?;
        Ok(process.connection.send(frame)?)
    }
}

#[derive(Debug, thiserror::Error)]
enum SendError {
    #[error("a descriptor cannot be sent ({0}): raise the limit of open files (ulimit -n)")]
    Descriptor(#[from] std::io::Error),
    #[error(transparent)]
    Frame(#[from] millrace_proto::frames::Error),
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
            tracing::error!(gpu = %self.gpu, incarnation, %error, "executor killed: a command cannot be sent to it");
            self.kill();
        }
    }

    fn memory(&self) -> Option<Lent> {
        Some(self.process.as_ref()?.memory.clone())
    }

    fn kill(&mut self) {
        let Some(process) = &self.process else { return };
        match pidfd_send_signal(process.pidfd.as_fd(), Signal::KILL) {
            Ok(()) => {}
            // It is gone already, and its end reported or on the way.
            Err(rustix::io::Errno::SRCH) => {}
            Err(error) => tracing::error!(gpu = %self.gpu, %error, "executor cannot be killed"),
        }
    }
}

impl Drop for ProcessPort {
    fn drop(&mut self) {
        self.kill();
    }
}
