//! Checks that a model file or program can be served, before anything is stored or committed.
//!
//! ```text
//!  controller ── the file, open, as standard input ──▶ millrace inspect PID
//!             ◀─ Answer, at most ANSWER_BYTES_MAX ───  limits itself, reads, compiles
//! ```
//! The file is untrusted and may be as large as the disk. A separate process reads and compiles the
//! file under limits of memory and processor time, so a hostile or huge file ends that process and not
//! the process that runs Raft. Inspections run in parallel while memory fits a budget; further
//! inspections wait.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use bytes::Bytes as Contents;
use millrace_cluster_state::quota::check_model;
use millrace_cluster_state::{ModelSummary, packed};
use millrace_model::program::{self, PackedProgram};
use millrace_model::{CompiledModel, ModelError};
use millrace_types::workflow::Signature;
use millrace_types::{Bytes, Failure, Reason};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::sync::Semaphore;

use crate::config::{Inspection, InspectorCommand};
use millrace_storage::VerifiedFile;

/// The longest answer of an inspecting process, in bytes. A summary that the log accepts is shorter.
const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// The longest message of a refusal, in characters. Names in a model file have no separate limit.
const MESSAGE_CHARS_MAX: usize = 4_096;
/// Memory that compiling needs beside the file and its copies, in bytes: decoded messages, which
/// `millrace_model` counts before decoding.
const COMPILE_BYTES: u64 = 1 << 30;
/// Copies of a file in memory at a time: the bytes read, the decoded file, and the resulting weights.
const COPIES: u64 = 3;
/// Base processor time of an inspection; [`CPU_BYTES_PER_SEC`] grants more time to large files.
const CPU_TIME: Duration = Duration::from_secs(60);
const CPU_BYTES_PER_SEC: u64 = 16 << 20;
/// The longest duration of an inspection, as a multiple of the processor time: an inspection also waits
/// for the disk and for other work.
const PATIENCE: u32 = 5;
/// File descriptors of an inspecting process: the standard three, and further descriptors from the
/// start.
const DESCRIPTORS: u64 = 16;
/// The unit of inspection memory, in bytes.
const MEMORY_UNIT: u64 = 1 << 20;

/// The answer of an inspecting process.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Served(ModelSummary),
    Refused { reason: String, message: String },
}

/// Checks model files, as many at a time as memory allows.
#[derive(Debug)]
pub(super) struct Inspector {
    inspection: Inspection,
    memory: Semaphore,
    /// Memory of all inspections together, in [`MEMORY_UNIT`]s.
    memory_units: u32,
}

impl Inspector {
    pub(super) fn new(inspection: Inspection, memory: Bytes) -> Self {
        let memory_units = units(memory.get());
        Self { inspection, memory: Semaphore::new(memory_units as usize), memory_units }
    }

    /// Compiles the file as a worker will, and returns the summary.
    pub(super) async fn inspect(&self, file: &VerifiedFile) -> Result<ModelSummary, Failure> {
        let bytes = file.bytes();
        // A file that needs more than the whole budget is inspected alone.
        let units = units(memory_bytes(bytes.get())).min(self.memory_units);
        // The semaphore is never closed, so acquiring cannot fail.
        let _memory = self.memory.acquire_many(units).await;
        let file = file.open()?;
        let model = match &self.inspection {
            Inspection::InProcess => in_process(file).await,
            Inspection::Child(command) => in_child_of_one_thread(command.clone(), file, bytes).await,
        }?;
        // Check the names here too, so that nothing of a model with too long names is stored.
        check_model(&model)
            .map_err(|error| Failure::new(Reason::InvalidModel, bounded(error.to_string())))?;
        Ok(model)
    }
}

fn units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(MEMORY_UNIT)).unwrap_or(u32::MAX).clamp(1, i32::MAX.unsigned_abs())
}

/// Returns the memory limit of an inspection of a file of `bytes` bytes, in bytes.
fn memory_bytes(bytes: u64) -> u64 {
    bytes.saturating_mul(COPIES).saturating_add(COMPILE_BYTES)
}

/// Returns the processor time limit of an inspection of a file of `bytes` bytes.
fn cpu_time(bytes: u64) -> Duration {
    CPU_TIME + Duration::from_secs(bytes / CPU_BYTES_PER_SEC)
}

async fn in_process(file: File) -> Result<ModelSummary, Failure> {
    let inspected = tokio::task::spawn_blocking(move || inspect(file)).await;
    // A panic on a client's bytes is our bug, and no reason to accept the file.
    inspected.map_err(|error| Failure::new(Reason::Internal, format!("cannot check the model: {error}")))?
}

/// Runs [`in_child`] on a blocking thread that lives as long as the child. The kernel kills the child
/// when the parent thread ends, and runtime threads come and go. Dropping this future kills the child.
async fn in_child_of_one_thread(
    command: InspectorCommand,
    file: File,
    bytes: Bytes,
) -> Result<ModelSummary, Failure> {
    let (_wanted, dropped) = tokio::sync::oneshot::channel::<()>();
    let runtime = tokio::runtime::Handle::current();
    let inspected = tokio::task::spawn_blocking(move || {
        runtime.block_on(async {
            tokio::select! {
                inspected = in_child(&command, file, bytes) => inspected,
                _ = dropped => Err(Failure::new(Reason::Cancelled, "the upload was cancelled while its model was checked")),
            }
        })
    });
    inspected
        .await
        .map_err(|error| Failure::new(Reason::Internal, format!("cannot check the model: {error}")))?
}

async fn in_child(command: &InspectorCommand, file: File, bytes: Bytes) -> Result<ModelSummary, Failure> {
    let not_started = |error: io::Error| {
        let message = format!("cannot start the process that checks models: {error}: try again soon");
        Failure::new(Reason::QueueFull, message)
    };
    let mut child = Command::new(&command.program)
        .args(&command.args)
        .arg(std::process::id().to_string())
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(file))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        // Ctrl-C in a terminal signals the whole process group, but a drain lets a running upload
        // finish.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(not_started)?;
    let Some(stdout) = child.stdout.take() else {
        return Err(Failure::new(Reason::Internal, "the process that checks models has no output pipe"));
    };
    let answered = async {
        let mut answer = Vec::new();
        // Reading stops at the bound and closes the pipe, so a process with a longer answer gets
        // SIGPIPE and ends.
        stdout.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await?;
        Ok::<_, io::Error>((answer, child.wait().await?))
    };
    let patience = cpu_time(bytes.get()) * PATIENCE;
    match tokio::time::timeout(patience, answered).await {
        Ok(Ok((answer, status))) => read_answer(&answer, status, bytes),
        Ok(Err(error)) => Err(not_started(error)),
        Err(_) => Err(Failure::new(
            Reason::InvalidModel,
            format!("checking the model took longer than {patience:?}: make it smaller or simpler"),
        )),
    }
}

fn read_answer(answer: &[u8], status: ExitStatus, bytes: Bytes) -> Result<ModelSummary, Failure> {
    if status.signal() == Some(Signal::KILL.as_raw()) {
        let message =
            "the process that checked the model was killed, probably for lack of memory: try again soon";
        return Err(Failure::new(Reason::QueueFull, message));
    }
    if !status.success() {
        let why = match status.signal() {
            Some(signal) => format!("was ended by signal {signal}"),
            None => format!("ended with {status}"),
        };
        let message = format!(
            "the process that checked the model {why}, under limits of {} of memory and {:?} of processor time: the file is damaged, or too large or complex to serve",
            Bytes(memory_bytes(bytes.get())),
            cpu_time(bytes.get())
        );
        return Err(Failure::new(Reason::InvalidModel, message));
    }
    match packed::from_slice(answer) {
        Ok(Answer::Served(model)) => Ok(model),
        Ok(Answer::Refused { reason, message }) => {
            Err(Failure::new(reason.parse().unwrap_or(Reason::InvalidModel), message))
        }
        Err(error) => {
            let message = format!("cannot read the answer of the process that checked the model: {error}");
            Err(Failure::new(Reason::Internal, message))
        }
    }
}

/// Checks the model on standard input and answers on standard output, under limits that this process
/// sets itself. Each fault of the file yields a refusal or ends this process.
#[must_use]
pub fn serve_inspection() -> ExitCode {
    let answered = limit_this_process().and_then(|file| {
        let answer = match inspect(file) {
            Ok(model) => Answer::Served(model),
            Err(Failure { reason, message, .. }) => Answer::Refused { reason: reason.to_string(), message },
        };
        let answer = rmp_serde::to_vec_named(&answer).map_err(io::Error::other)?;
        io::stdout().write_all(&answer)
    });
    match answered {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("millrace inspect: {error}: only a controller may start this command");
            ExitCode::FAILURE
        }
    }
}

/// Limits memory, processor time and descriptors by the size of the file on standard input.
fn limit_this_process() -> io::Result<File> {
    let file = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("standard input is not a regular file"));
    }
    // When memory is short, the kernel kills this process first, and not the controller. On a system
    // without this file, only the order of killing changes.
    std::fs::write("/proc/self/oom_score_adj", "1000").ok();
    // The memory limit also covers pages that are mapped already, above all the program itself.
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = statm.split(' ').next().and_then(|pages| pages.parse().ok()).unwrap_or(0);
    let mapped = pages.saturating_mul(rustix::param::page_size() as u64);
    limit(Resource::As, mapped.saturating_add(memory_bytes(metadata.len())))?;
    // At the hard limit the kernel sends SIGKILL, which looks like a memory shortage. SIGXCPU at the
    // soft limit names the cause.
    let cpu = cpu_time(metadata.len()).as_secs();
    let hard = getrlimit(Resource::Cpu).maximum.map_or(cpu + 1, |maximum| maximum.min(cpu + 1));
    setrlimit(Resource::Cpu, Rlimit { current: Some(cpu.min(hard)), maximum: Some(hard) })?;
    limit(Resource::Nofile, DESCRIPTORS)?;
    limit(Resource::Core, 0)?;
    limit(Resource::Fsize, 0)?;
    Ok(file)
}

/// Lowers a limit permanently. A limit that is already lower stays.
fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let value = getrlimit(resource).maximum.map_or(value, |maximum| maximum.min(value));
    Ok(setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) })?)
}

/// Compiles a file and returns the summary.
fn inspect(file: File) -> Result<ModelSummary, Failure> {
    let contents = read(file)?;
    if program::is_program(&contents) {
        let unpacked = PackedProgram::unpack(&contents);
        return unpacked
            .map(summary_of_program)
            .map_err(|error| Failure::new(Reason::InvalidModel, bounded(error.to_string())));
    }
    millrace_model::compile(&contents).map(summary).map_err(|error| refusal(&error))
}

fn read(mut file: File) -> Result<Contents, Failure> {
    let unreadable = |error: io::Error| {
        Failure::new(Reason::Internal, format!("cannot read the model file to check it: {error}"))
    };
    let len = usize::try_from(file.metadata().map_err(unreadable)?.len()).unwrap_or(usize::MAX);
    let mut contents = Vec::new();
    contents.try_reserve_exact(len).map_err(|_| {
        Failure::new(
            Reason::ModelTooLarge,
            format!("cannot check a model file of {len} bytes: out of memory"),
        )
    })?;
    file.read_to_end(&mut contents).map_err(unreadable)?;
    Ok(contents.into())
}

fn refusal(error: &ModelError) -> Failure {
    let reason = match error {
        ModelError::UnsupportedOperators { .. } => Reason::UnsupportedOperator,
        _ => Reason::InvalidModel,
    };
    Failure::new(reason, bounded(error.to_string()))
}

fn bounded(message: String) -> String {
    match message.char_indices().nth(MESSAGE_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &message[..end]),
        None => message,
    }
}

/// Returns the summary of a program, which has no weights and no launches.
fn summary_of_program(program: PackedProgram) -> ModelSummary {
    let Signature { inputs, outputs } = program.signature;
    ModelSummary { weights: Bytes::ZERO, parameters: 0, launches: 0, inputs, outputs }
}

fn summary(compiled: CompiledModel) -> ModelSummary {
    ModelSummary {
        weights: Bytes(compiled.summary.weights_bytes),
        parameters: compiled.summary.parameters,
        launches: u32::try_from(compiled.launches.len()).unwrap_or(u32::MAX),
        inputs: compiled.summary.inputs,
        outputs: compiled.summary.outputs,
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    #[test]
    fn a_long_message_is_cut_between_characters() {
        assert_eq!(bounded("ä".to_owned()), "ä");
        assert_eq!(bounded("ä".repeat(5_000)).chars().count(), MESSAGE_CHARS_MAX + 1);
    }

    #[test]
    fn memory_units_are_rounded_up_and_never_zero() {
        assert_eq!(units(0), 1);
        assert_eq!(units(MEMORY_UNIT + 1), 2);
        assert_eq!(units(u64::MAX), i32::MAX.unsigned_abs());
        assert_eq!(memory_bytes(10), COMPILE_BYTES + 30);
    }

    #[tokio::test]
    async fn a_crash_of_the_inspector_refuses_the_model_but_a_kill_or_failed_start_is_retryable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model");
        std::fs::write(&path, b"a model").unwrap();
        let check = async |program: &str, args: &[&str]| {
            let args = args.iter().map(OsString::from).collect();
            let command = InspectorCommand { program: program.into(), args };
            in_child(&command, File::open(&path).unwrap(), Bytes(7)).await.unwrap_err()
        };
        let aborted = check("/bin/sh", &["-c", "kill -ABRT $$"]).await;
        assert_eq!((aborted.reason, aborted.retryable), (Reason::InvalidModel, false));
        assert!(aborted.message.contains("was ended by signal 6"), "{}", aborted.message);
        let killed = check("/bin/sh", &["-c", "kill -KILL $$"]).await;
        assert_eq!((killed.reason, killed.retryable), (Reason::QueueFull, true));
        assert_eq!(check("/bin/sh", &["-c", "exit 3"]).await.reason, Reason::InvalidModel);
        assert_eq!(check("/bin/sh", &["-c", "echo nonsense"]).await.reason, Reason::Internal);
        let missing = check("/nonexistent/millrace", &[]).await;
        assert_eq!((missing.reason, missing.retryable), (Reason::QueueFull, true));
    }
}
