//! The options that several servers share.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use millrace_client::Address;
use millrace_device::topology::TopologyDescription;
use millrace_transport::PortLimits;
use millrace_types::policy::PresetName;
use millrace_types::topology::Topology;
use millrace_types::{Bytes, NodeName};
use millrace_worker::process_port::ExecutorCommand;
use millrace_worker::service::{InjectedFaults, ServiceLimits};
use millrace_worker::start::{
    DataConfig, ENGINES, ExecutorDevice, ExecutorEngine, ExecutorIsolation, ISOLATIONS, LookupOrder,
    ProgramLauncher, SchedulingPolicy, WorkerConfig,
};

use crate::commands::gpus::{self, DeviceChoice, GpuLimits, WorkerGpus};
use crate::failure::CommandFailure;
use crate::process::seed;

/// The default port of a worker, for gateways.
pub(crate) const WORKER_PORT: u16 = 7080;

/// A worker's GPUs and memory.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct WorkerOptions {
    /// The GPUs of each worker: this machine's (cuda), emulated GPUs (emulated, or the name of a
    /// machine to emulate), or automatic (auto). Automatic means this machine's GPUs if a driver and
    /// ONNX Runtime's library for CUDA are found, else emulated GPUs.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = DeviceChoice::parser())]
    device: DeviceChoice,
    /// The number of GPUs of each worker [default: all GPUs of the machine; 2 with --device emulated].
    #[arg(long, value_name = "N")]
    gpus: Option<NonZeroU32>,
    /// The memory of each GPU for models and objects, such as 2GiB [default: nearly all of a real GPU's memory; 1GiB with --device emulated].
    #[arg(long, value_name = "SIZE")]
    gpu_memory: Option<Bytes>,
    /// The host memory limit of a worker's models.
    #[arg(long, value_name = "SIZE", default_value = "8GiB")]
    host_memory: Bytes,
    /// The memory limit of one worker's objects, on its GPUs and its host: the data that workflows
    /// pass from function to function. Objects get at most a quarter of each GPU.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    object_memory: Bytes,
    /// The disk limit of the models that a worker accepts. Models beyond --host-memory wait on
    /// the worker's disk, and the first request for one of them waits for its load (a cold start)
    /// [default: as --host-memory].
    #[arg(long, value_name = "SIZE")]
    model_storage: Option<Bytes>,
    /// The models that share an executor process: all models of a GPU (gpu), or none, with one
    /// process for each model from its first request on (model) or while it is on the GPU
    /// (resident).
    #[arg(long, value_name = "NAME", default_value_t, value_parser = one_of(ISOLATIONS))]
    isolation: ExecutorIsolation,
    /// The engine that runs models: rten, which is part of this program and needs emulated GPUs, or
    /// ONNX Runtime (ort) from the library at ORT_DYLIB_PATH [default: rten with emulated GPUs, ort
    /// with this machine's].
    #[arg(long, value_name = "NAME", value_parser = one_of(ENGINES))]
    engine: Option<ExecutorEngine>,
}

/// The name, the folder and the port of a worker, and its share of the machine.
#[derive(Debug, Clone)]
pub(crate) struct WorkerIdentity {
    pub(crate) node: NodeName,
    pub(crate) data_dir: PathBuf,
    pub(crate) listen: SocketAddr,
    /// The connection limits of the worker's port.
    pub(crate) port: PortLimits,
    /// The threads for each executor's launches.
    pub(crate) executor_threads: u32,
}

/// An action that servers refuse unless the command line allows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Permission {
    // No doc comments, because the help would list them beside the option's own text.
    Processes,
    Faults,
}

impl Permission {
    pub(crate) const ALL: [Self; 2] = [Self::Faults, Self::Processes];

    fn word(self) -> &'static str {
        match self {
            Self::Processes => "processes",
            Self::Faults => "faults",
        }
    }
}

/// The options for serving and stopping a server.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ServerOptions {
    /// The time that running requests may take when the server stops.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "10s")]
    pub(crate) grace: Duration,
    /// Allow an action that is refused by default: obey fault injection through the admin API, for
    /// tests (faults), or run users' programs as functions with this user's rights, on workers
    /// only (processes).
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_enum)]
    pub(crate) allow: Vec<Permission>,
    /// Listen on addresses other than loopback, without encryption or authentication.
    #[arg(long)]
    pub(crate) insecure: bool,
}

/// The names by which clients address a server.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct HostNames {
    /// A name by which clients address this server, such as the DNS name of a service; may be
    /// repeated. The server also answers to localhost, this machine's name, and the addresses at
    /// which it listens and that it advertises. Requests to other names are refused, because a web
    /// page can make a name of its own resolve to this server.
    #[arg(long = "host-name", value_name = "NAME", value_parser = host_name)]
    names: Vec<String>,
}

/// The scheduling policy of a new cluster.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct InitialPolicy {
    /// The scheduling preset until an operator sets a policy: Millrace's own (unified), the Torpor
    /// paper's (torpor), the LALB paper's (lalb-o3), or order of arrival (fifo). A cluster that has
    /// a policy keeps it: 'millrace policy set' changes it [default: unified].
    #[arg(long, value_name = "NAME", value_parser = named(PresetName::ALL, PresetName::name))]
    pub(crate) preset: Option<PresetName>,
}

impl InitialPolicy {
    /// Returns the command-line words for these options.
    pub(crate) fn words(&self) -> Vec<String> {
        self.preset.iter().flat_map(|preset| ["--preset".to_owned(), preset.to_string()]).collect()
    }
}

/// The process that started a server, other than a person or a service manager.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ParentProcess {
    /// End (kill -9) with this process, which started this one.
    #[arg(long, value_name = "PID", hide = true)]
    die_with: Option<u32>,
}

impl WorkerOptions {
    /// Returns the GPUs of a worker on a machine with this many workers.
    pub(crate) fn gpus(&self, workers: NonZeroU32) -> Result<WorkerGpus, CommandFailure> {
        let limits = GpuLimits { gpus: self.gpus, memory: self.gpu_memory };
        match (&self.device, self.why_emulated(workers)) {
            (DeviceChoice::Cuda, Some(reason)) => {
                Err(CommandFailure::usage(format!("--device cuda cannot be used with {reason}")))
            }
            (DeviceChoice::Cuda, None) => gpus::cuda(limits),
            (DeviceChoice::Emulated(_), _) | (DeviceChoice::Auto, Some(_)) => self.emulated(),
            (DeviceChoice::Auto, None) => gpus::cuda(limits).or_else(|missing| {
                let emulated = self.emulated()?;
                let reason = missing.message.unwrap_or_default();
                tracing::info!("the GPUs are emulated: {reason}");
                Ok(emulated)
            }),
        }
    }

    /// Returns the option that only emulated GPUs have, if there is one.
    fn why_emulated(&self, workers: NonZeroU32) -> Option<String> {
        if workers.get() > 1 {
            // Each worker would take the memory of all GPUs.
            return Some("several workers on a machine".to_owned());
        }
        if self.isolation.per_model() {
            return Some(format!("--isolation {}", self.isolation));
        }
        (self.engine == Some(ExecutorEngine::Rten)).then(|| "--engine rten".to_owned())
    }

    /// Returns emulated GPUs, after a check that the engine's library can be opened.
    fn emulated(&self) -> Result<WorkerGpus, CommandFailure> {
        let engine = self.engine.unwrap_or_default();
        if engine == ExecutorEngine::Ort {
            millrace_executor::check_library().map_err(|error| {
                CommandFailure::failed(format!("--engine ort: {error}")).hint(format!(
                    "install the Python package onnxruntime (1.24 or newer) and set {} to the \
                     libonnxruntime.so in its folder capi, or start with --engine rten",
                    millrace_executor::LIBRARY_VARIABLE
                ))
            })?;
        }
        let topology = topology(self.device.topology(), self.gpus, self.gpu_memory)?;
        Ok(WorkerGpus { topology, device: ExecutorDevice::Emulated, engine })
    }

    /// Returns the configuration of a worker that advertises its listen address and knows no controller.
    pub(crate) fn config(
        &self,
        server: &ServerOptions,
        gpus: WorkerGpus,
        identity: WorkerIdentity,
    ) -> Result<WorkerConfig, CommandFailure> {
        let WorkerGpus { topology, device, engine } = gpus;
        let WorkerIdentity { node, data_dir, listen, port, executor_threads } = identity;
        Ok(WorkerConfig {
            node,
            data_dir,
            listen,
            advertise: None,
            controllers: Vec::new(),
            topology,
            host_memory: self.host_memory,
            object_memory: self.object_memory,
            gpu_data: DataConfig { memory: self.object_memory, ..DataConfig::default() },
            model_storage: self.model_storage()?,
            policy: SchedulingPolicy::default(),
            isolation: self.isolation,
            engine,
            device,
            lookup: LookupOrder::default(),
            executor: ExecutorCommand::this_program()
                .map_err(|error| CommandFailure::failed(format!("cannot find this program: {error}")))?,
            executor_threads,
            programs: server.programs()?,
            faults: server.faults(),
            seed: seed()?,
            limits: ServiceLimits { port, ..ServiceLimits::default() },
            kept: None,
        })
    }

    /// Returns the disk limit of the models that a worker accepts.
    fn model_storage(&self) -> Result<Bytes, CommandFailure> {
        match self.model_storage {
            Some(storage) if storage < self.host_memory => Err(CommandFailure::usage(format!(
                "--model-storage {storage} is less than --host-memory {}",
                self.host_memory
            ))
            .hint("models that fit in host memory need no disk: omit --model-storage")),
            storage => Ok(storage.unwrap_or(self.host_memory)),
        }
    }

    /// Returns the command-line words for these options with these GPUs.
    pub(crate) fn words(&self, gpus: &WorkerGpus) -> Vec<String> {
        let device = match gpus.device {
            ExecutorDevice::Emulated => self.device.topology().to_owned(),
            ExecutorDevice::Cuda { .. } => gpus.device.to_string(),
        };
        let mut words = vec!["--device".to_owned(), device];
        if let Some(gpus) = self.gpus {
            words.extend(["--gpus".to_owned(), gpus.to_string()]);
        }
        if let Some(memory) = self.gpu_memory {
            words.extend(["--gpu-memory".to_owned(), memory.get().to_string()]);
        }
        words.extend(["--host-memory".to_owned(), self.host_memory.get().to_string()]);
        words.extend(["--object-memory".to_owned(), self.object_memory.get().to_string()]);
        if let Some(storage) = self.model_storage {
            words.extend(["--model-storage".to_owned(), storage.get().to_string()]);
        }
        words.extend(["--isolation".to_owned(), self.isolation.to_string()]);
        words.extend(["--engine".to_owned(), gpus.engine.to_string()]);
        words
    }
}

impl ServerOptions {
    /// Returns whether injected faults are obeyed.
    fn faults(&self) -> InjectedFaults {
        if self.allows(Permission::Faults) { InjectedFaults::Obey } else { InjectedFaults::Refuse }
    }

    /// Returns the launcher of users' programs, if the worker may run programs.
    fn programs(&self) -> Result<Option<ProgramLauncher>, CommandFailure> {
        let launcher = self.allows(Permission::Processes).then(ProgramLauncher::this_program).transpose();
        launcher.map_err(|error| CommandFailure::failed(format!("cannot find this program: {error}")))
    }

    /// Returns whether the command line allows an action.
    pub(crate) fn allows(&self, action: Permission) -> bool {
        self.allow.contains(&action)
    }

    /// Returns the command-line words for those of these actions that are allowed.
    pub(crate) fn allowed(&self, actions: &[Permission]) -> Vec<String> {
        let allowed = actions.iter().filter(|action| self.allows(**action));
        allowed.flat_map(|action| ["--allow".to_owned(), action.word().to_owned()]).collect()
    }

    /// Returns the command-line words for these options, without the allowed actions.
    pub(crate) fn words(&self) -> Vec<String> {
        let grace = humantime::format_duration(self.grace).to_string().replace(' ', "");
        let mut words = vec!["--grace".to_owned(), grace];
        words.extend(self.insecure.then(|| "--insecure".to_owned()));
        words
    }

    /// Refuses to listen off loopback without `--insecure`.
    pub(crate) fn check_exposed(&self, address: SocketAddr) -> Result<(), CommandFailure> {
        if address.ip().is_loopback() || self.insecure {
            return Ok(());
        }
        Err(CommandFailure::usage(format!(
            "{address} is not a loopback address: every client that reaches it would be served, without encryption or authentication"
        ))
        .hint("listen on 127.0.0.1, or add --insecure"))
    }
}

impl HostNames {
    /// Returns the given names and the machine's name.
    pub(crate) fn all(&self) -> Vec<String> {
        self.names.iter().cloned().chain(machine_name()).collect()
    }

    /// Returns the command-line words for these options.
    pub(crate) fn words(&self) -> Vec<String> {
        self.names.iter().flat_map(|name| ["--host-name".to_owned(), name.clone()]).collect()
    }
}

fn host_name(text: &str) -> Result<String, String> {
    match millrace_proto::browser::host(text) {
        Some(host) if host == text => Ok(text.to_owned()),
        _ => Err("write a name without a port, such as models.example".to_owned()),
    }
}

/// Returns this machine's name, as `uname -n` prints it, or `None` if the system does not report a
/// name.
fn machine_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

impl ParentProcess {
    /// Ties this process to the process that started it, if any. Must be called first, on the main
    /// thread.
    pub(crate) fn tie_lifetime(&self) -> Result<(), CommandFailure> {
        self.die_with.map_or(Ok(()), crate::process::die_with)
    }
}

/// Returns the address to advertise. A listener on all addresses needs an explicit address.
pub(crate) fn advertised(
    said: Option<&Address>,
    listens: SocketAddr,
    flag: &str,
) -> Result<Option<String>, CommandFailure> {
    match said {
        Some(address) => Ok(Some(address.authority().to_owned())),
        None if listens.ip().is_unspecified() => Err(CommandFailure::usage(format!(
            "other processes cannot connect to {listens}, which stands for all addresses of this machine"
        ))
        .hint(format!("set the address at which they reach this machine: {flag} HOST:PORT"))),
        None => Ok(None),
    }
}

/// Parses a name of a table. The refusal of another name lists all names.
pub(crate) fn one_of<T, const N: usize>(all: [(&'static str, T); N]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: std::error::Error + Send + Sync + 'static> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(all.map(|(name, _)| name)).try_map(|name| name.parse::<T>())
}

/// Parses a name of a list. The refusal of another name lists all names.
pub(crate) fn named<T>(all: &'static [T], name: fn(T) -> &'static str) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: std::error::Error + Send + Sync + 'static> + Copy + Send + Sync + 'static,
{
    PossibleValuesParser::new(all.iter().map(move |&it| name(it))).try_map(|name| name.parse::<T>())
}

/// Returns a preset with its number of GPUs and memory changed.
pub(crate) fn topology(
    name: &str,
    gpus: Option<NonZeroU32>,
    memory: Option<Bytes>,
) -> Result<Topology, CommandFailure> {
    let usage = |error: millrace_device::topology::Error| CommandFailure::usage(error.to_string());
    if memory == Some(Bytes::ZERO) {
        return Err(CommandFailure::usage("--gpu-memory is 0: set a size such as 1GiB"));
    }
    let mut description = TopologyDescription::preset(name).map_err(usage)?;
    if let Some(gpus) = gpus {
        description = description.with_gpus(gpus).map_err(usage)?;
    }
    if let Some(memory) = memory {
        description = description.with_memory(memory);
    }
    Ok(description.build())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;
    use millrace_device::topology::preset_names;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        machine: WorkerOptions,
        #[command(flatten)]
        options: ServerOptions,
        #[command(flatten)]
        host_names: HostNames,
    }

    /// Returns the GPUs of a line, without a look for the library of its engine.
    fn emulated_gpus(line: &Line) -> WorkerGpus {
        let machine = &line.machine;
        let topology = topology(machine.device.topology(), machine.gpus, machine.gpu_memory).unwrap();
        let engine = machine.engine.unwrap_or_default();
        WorkerGpus { topology, device: ExecutorDevice::Emulated, engine }
    }

    #[test]
    fn options_round_trip_through_their_words() {
        let line = ["x", "--gpus", "3", "--gpu-memory", "2GiB", "--device", "a10x4", "--grace", "1m 5s"];
        for typed in [&line[..1], &line[..]] {
            for more in [
                &[][..],
                &[
                    "--insecure",
                    "--allow",
                    "faults,processes",
                    "--host-memory",
                    "1GiB",
                    "--object-memory",
                    "256MiB",
                    "--model-storage",
                    "8GiB",
                    "--isolation",
                    "resident",
                    "--engine",
                    "ort",
                    "--host-name",
                    "models.example",
                    "--host-name",
                    "models",
                ],
            ] {
                let mut first = Line::parse_from(typed.iter().chain(more));
                let gpus = emulated_gpus(&first);
                // The words name the outcome of a choice.
                first.machine.device = DeviceChoice::Emulated(first.machine.device.topology().to_owned());
                first.machine.engine = Some(gpus.engine);
                let words = [
                    first.machine.words(&gpus),
                    first.options.words(),
                    first.options.allowed(&Permission::ALL),
                    first.host_names.words(),
                ]
                .concat();
                let again = Line::parse_from(std::iter::once("x".to_owned()).chain(words));
                assert_eq!(format!("{first:?}"), format!("{again:?}"));
            }
        }
    }

    #[test]
    fn a_host_name_with_a_port_is_refused() {
        for name in ["models.example:8080", "http://models", "", "[::1]", "a@b"] {
            assert!(Line::try_parse_from(["x", "--host-name", name]).is_err(), "{name}");
        }
        let names = Line::parse_from(["x", "--host-name", "models.example"]).host_names;
        assert_eq!(
            names.all(),
            ["models.example".to_owned()].into_iter().chain(machine_name()).collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_listener_on_all_addresses_needs_an_advertised_address() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let named: Address = "h:1".parse().unwrap();
        assert_eq!(advertised(None, at("10.0.0.1:1"), "--advertise"), Ok(None));
        assert_eq!(advertised(Some(&named), at("0.0.0.0:1"), "--advertise"), Ok(Some("h:1".into())));
        let refused = advertised(None, at("0.0.0.0:1"), "--advertise").unwrap_err();
        assert!(refused.hint.unwrap().contains("--advertise"));
    }

    #[test]
    fn addresses_off_loopback_need_the_insecure_flag() {
        let parsed = |more: &[&str]| Line::parse_from(["x"].iter().chain(more)).options;
        let everywhere = "0.0.0.0:1".parse().unwrap();
        assert!(parsed(&[]).check_exposed("127.0.0.1:1".parse().unwrap()).is_ok());
        assert!(parsed(&[]).check_exposed(everywhere).unwrap_err().hint.unwrap().contains("--insecure"));
        assert!(parsed(&["--insecure"]).check_exposed(everywhere).is_ok());
    }

    /// Checks that an option accepts each name of its table, and that the refusal of another name
    /// lists all names.
    fn takes_the_names<T: Clone + PartialEq + std::fmt::Debug>(
        flag: &str,
        table: &[(&str, T)],
        chosen: impl Fn(Line) -> T,
    ) {
        let parse = |name: &str| Line::try_parse_from(["x", flag, name]).map(&chosen);
        for (name, it) in table {
            assert_eq!(parse(name).unwrap(), *it);
        }
        let refused = parse("lifo").unwrap_err().to_string();
        let names: Vec<_> = table.iter().map(|(name, _)| *name).collect();
        assert!(refused.contains(&names.join(", ")), "{refused}");
    }

    #[test]
    fn isolation_accepts_only_the_names_of_its_table() {
        takes_the_names("--isolation", &ISOLATIONS, |line| line.machine.isolation);
    }

    #[test]
    fn engine_accepts_only_the_names_of_its_table() {
        takes_the_names("--engine", &ENGINES, |line| line.machine.engine.unwrap());
    }

    #[test]
    fn model_storage_below_host_memory_is_refused() {
        let storage = |words: &[&str]| Line::parse_from(["x"].iter().chain(words)).machine.model_storage();
        assert_eq!(storage(&["--host-memory", "1GiB"]), Ok(Bytes::gib(1)));
        assert_eq!(storage(&["--host-memory", "1GiB", "--model-storage", "3GiB"]), Ok(Bytes::gib(3)));
        assert!(storage(&["--host-memory", "4GiB", "--model-storage", "3GiB"]).is_err());
    }

    #[test]
    fn object_memory_has_the_workers_default() {
        let memory = |words: &[&str]| Line::parse_from(["x"].iter().chain(words)).machine.object_memory;
        assert_eq!(memory(&[]), millrace_worker::start::OBJECT_MEMORY);
        assert_eq!(memory(&["--object-memory", "256MiB"]), Bytes::mib(256));
    }

    #[test]
    fn a_device_is_one_of_this_machine_or_of_the_emulated_machines() {
        let parse =
            |name: &str| Line::try_parse_from(["x", "--device", name]).map(|line| line.machine.device);
        assert_eq!(parse("auto").unwrap(), DeviceChoice::Auto);
        assert_eq!(parse("cuda").unwrap(), DeviceChoice::Cuda);
        for name in preset_names() {
            assert_eq!(parse(name).unwrap(), DeviceChoice::Emulated(name.to_owned()));
        }
        let refused = parse("dgx").unwrap_err().to_string();
        assert!(refused.contains("auto, cuda, emulated") && refused.contains("dgx-v100"), "{refused}");
    }

    #[test]
    fn a_gpu_without_memory_is_refused() {
        assert!(topology("emulated", None, Some(Bytes::ZERO)).is_err());
    }
}
