//! Tests of processes as the operating system sees them: no process stays behind, and nothing
//! leaks.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;

use millrace_proto::{OOM_SCORE_ADJ, worker as wire};
use millrace_worker::start::ExecutorIsolation;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{PidfdFlags, Resource, Rlimit, getrlimit, pidfd_open, prlimit};

use crate::controller::Controller;
use crate::support::{WORKER_VARIABLE, all_up, kill_9, pid, this_program_as, topology, within};

/// Waits for the end of a process through a pidfd, which names that process alone.
pub(crate) struct End(OwnedFd);

impl End {
    pub(crate) fn of(number: u32) -> Self {
        Self(pidfd_open(pid(number), PidfdFlags::empty()).unwrap())
    }

    pub(crate) async fn wait(self) {
        let readable = tokio::task::spawn_blocking(move || {
            poll(&mut [PollFd::new(&self.0, PollFlags::IN)], None).unwrap();
        });
        within("a process to end", readable).await.unwrap();
    }
}

/// A worker in a separate process.
pub(crate) struct WorkerProcess {
    pub(crate) child: tokio::process::Child,
}

impl WorkerProcess {
    pub(crate) fn start(dir: &Path, controller: &Controller, isolation: ExecutorIsolation) -> Self {
        let (program, args) = this_program_as("worker_child");
        let child = tokio::process::Command::new(program)
            .args(args)
            .env(WORKER_VARIABLE, format!("{}|{}|{isolation}", dir.display(), controller.addr))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        Self { child }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id().unwrap()
    }

    /// Limits the worker to `more` descriptors beyond those it has now. Returns the earlier limit.
    pub(crate) fn spare_descriptors(&self, more: usize) -> Rlimit {
        let entries = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let number = |entry: std::io::Result<std::fs::DirEntry>| {
            entry.unwrap().file_name().to_str().unwrap().parse::<u64>().unwrap()
        };
        let taken: BTreeSet<u64> = entries.map(number).collect();
        // A new descriptor gets the lowest free number, if that is below the limit.
        let current = (0..).filter(|number| !taken.contains(number)).nth(more);
        let maximum = getrlimit(Resource::Nofile).maximum;
        self.limit_descriptors(Rlimit { current, maximum })
    }

    /// Sets the limit of the worker's descriptors. Returns the earlier limit.
    pub(crate) fn limit_descriptors(&self, limit: Rlimit) -> Rlimit {
        prlimit(Some(pid(self.pid())), Resource::Nofile, limit).unwrap()
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    /// Returns the number of the worker's children, zombies included.
    fn children(&self) -> usize {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let of = |task: std::io::Result<std::fs::DirEntry>| {
            let children = std::fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default();
            children.split_whitespace().count()
        };
        tasks.map(of).sum()
    }

    fn resident_bytes(&self) -> usize {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.pid())).unwrap();
        statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
    }
}

fn executor_pids(telemetry: &wire::Telemetry) -> Vec<u32> {
    telemetry.gpus.iter().map(|gpu| gpu.executor_pid).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_killed_with_9_leaves_no_executor() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let mut worker = WorkerProcess::start(dir.path(), &controller, ExecutorIsolation::Gpu);
    let telemetry = all_up(&controller).await;
    let ends: Vec<End> = executor_pids(&telemetry).into_iter().map(End::of).collect();
    assert_eq!(ends.len(), 2);
    kill_9(worker.pid());
    worker.child.wait().await.unwrap();
    for end in ends {
        end.wait().await;
    }
}

/// Returns a file of a process's folder in `/proc`.
pub(crate) fn proc_file(pid: u32, name: &str) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/{name}")).unwrap();
    String::from_utf8_lossy(&bytes).trim_end().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn executors_have_none_of_the_workers_variables() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let worker = WorkerProcess::start(dir.path(), &controller, ExecutorIsolation::Gpu);
    let executors = executor_pids(&all_up(&controller).await);
    // The variable stands for an operator's secret.
    let canary = format!("{WORKER_VARIABLE}=");
    assert!(proc_file(worker.pid(), "environ").contains(&canary));
    for executor in executors {
        let environment = proc_file(executor, "environ");
        assert!(!environment.contains(&canary), "{environment}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kernel_kills_executors_before_their_worker_when_memory_is_short() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let _worker = WorkerProcess::start(dir.path(), &controller, ExecutorIsolation::Gpu);
    for executor in executor_pids(&all_up(&controller).await) {
        assert_eq!(proc_file(executor, "oom_score_adj"), OOM_SCORE_ADJ.to_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_memory_of_executors_is_limited() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let _worker = WorkerProcess::start(dir.path(), &controller, ExecutorIsolation::Gpu);
    let telemetry = all_up(&controller).await;
    let limit = millrace_executor::MEMORY_BESIDE_GPU + topology(1).gpus[0].memory;
    for executor in executor_pids(&telemetry) {
        let limits = proc_file(executor, "limits");
        let data = limits.lines().find(|line| line.starts_with("Max data size")).unwrap();
        assert!(data.contains(&limit.get().to_string()), "{data}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_killed_executors_leave_no_process_no_descriptor_and_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let worker = WorkerProcess::start(dir.path(), &controller, ExecutorIsolation::Gpu);
    let digest = controller.publish(&millrace_model::synth::tiny_cnn());
    controller.desire(&[("cnn", digest)]);
    controller.ready("cnn").await;
    all_up(&controller).await;
    let before = (worker.children(), worker.descriptors());
    let resident = worker.resident_bytes();
    for round in 0..20 {
        let telemetry = all_up(&controller).await;
        let gpu = &telemetry.gpus[round % 2];
        let index = gpu.index as usize;
        let incarnation = gpu.incarnation;
        kill_9(gpu.executor_pid);
        let again = |telemetry: &wire::Telemetry| {
            let gpu = &telemetry.gpus[index];
            gpu.incarnation > incarnation && gpu.health() == wire::GpuHealth::Up
        };
        controller.telemetry("the executor again", again).await;
    }
    assert_eq!((worker.children(), worker.descriptors()), before);
    // Allocators keep some memory; a mapping or buffer leaked per kill would be far more.
    let grown = worker.resident_bytes().saturating_sub(resident);
    assert!(grown < 8 << 20, "{grown} bytes more after 20 kills");
}
