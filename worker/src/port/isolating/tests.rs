use std::cell::RefCell;
use std::rc::Rc;
use std::sync::mpsc;

use millrace_proto::executor::{
    Cancel, CopyDone, ForgetPeer, Map, ProgramLoaded, RunDone, Shutdown, UnloadProgram,
};
use millrace_types::Bytes;

use super::*;

/// The calls to the ports of the processes, in order, each with the number of its process.
type Log = Rc<RefCell<Vec<(u32, String)>>>;

struct Fakes {
    log: Log,
    sinks: Rc<RefCell<Vec<PortSink>>>,
    memories: u32,
    refuse: bool,
}

struct Fake {
    number: u32,
    log: Log,
}

impl Fake {
    fn note(&self, what: impl Into<String>) {
        self.log.borrow_mut().push((self.number, what.into()));
    }
}

impl ExecutorPort for Fake {
    fn start(&mut self, incarnation: Incarnation) {
        self.note(format!("start {incarnation}"));
    }

    fn send(&mut self, command: Command, _: Vec<Descriptor>) {
        self.note(match command {
            Command::LoadProgram(load) => format!("load {}", load.program),
            Command::Map(map) => format!("map {}", map.program),
            Command::Copy(copy) => format!("copy {}", copy.batch),
            Command::Run(run) => format!("run {}", run.run),
            Command::Cancel(cancel) => format!("cancel {}", cancel.run),
            Command::AddPeer(peer) => format!("peer {}", peer.gpu),
            Command::ForgetPeer(peer) => format!("forget {}", peer.gpu),
            Command::Shutdown(_) => "shutdown".to_owned(),
            other => format!("{other:?}"),
        });
    }

    fn kill(&mut self) {
        self.note("kill");
    }
}

impl IsolatedProcessFactory for Fakes {
    fn memory(&mut self) -> Result<SharedDeviceMemory, String> {
        if self.refuse {
            return Err("no memory".to_owned());
        }
        self.memories += 1;
        let descriptor = Arc::new(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
        Ok(SharedDeviceMemory { descriptor, bytes: Bytes(self.memories.into()), sms: None })
    }

    fn part(&mut self, _: &SharedDeviceMemory, _: &str, sink: PortSink) -> Box<dyn ExecutorPort> {
        let mut sinks = self.sinks.borrow_mut();
        sinks.push(sink);
        Box::new(Fake { number: sinks.len() as u32, log: self.log.clone() })
    }
}

struct Bench {
    port: IsolatingPort<Fakes>,
    log: Log,
    sinks: Rc<RefCell<Vec<PortSink>>>,
    events: mpsc::Receiver<PortEvent>,
}

use std::os::fd::OwnedFd;
use std::sync::Arc;

impl Bench {
    fn new() -> Self {
        let (told, events) = mpsc::channel();
        let sink = PortSink::new(move |event| told.send(event).unwrap());
        let log = Log::default();
        let sinks = Rc::default();
        let parts = Fakes { log: Rc::clone(&log), sinks: Rc::clone(&sinks), memories: 0, refuse: false };
        let mut bench = Self { port: IsolatingPort::new(parts, sink), log, sinks, events };
        bench.port.start(Incarnation(1));
        assert_eq!(bench.heard(), ["ready, pid 0"]);
        bench
    }

    /// Returns a bench with two programs, each loaded in a process of its own.
    fn two() -> Self {
        let mut bench = Self::new();
        for program in [10, 20] {
            bench.send(load(program));
            bench.says(program / 10, loaded(program));
        }
        assert_eq!(bench.heard(), ["loaded 10", "loaded 20"]);
        bench.log();
        bench
    }

    fn send(&mut self, command: Command) {
        self.port.send(command, Vec::new());
    }

    /// Delivers an event of a process.
    fn says(&self, number: u64, kind: PortEventKind) {
        self.sinks.borrow()[number as usize - 1].deliver(PortEvent { incarnation: Incarnation(1), kind });
    }

    /// Returns the calls to the ports of the processes since the last call of this function.
    fn log(&self) -> Vec<(u32, String)> {
        std::mem::take(&mut self.log.borrow_mut())
    }

    /// Returns the events that the actor has to handle.
    fn heard(&mut self) -> Vec<String> {
        let mut heard = Vec::new();
        while let Ok(event) = self.events.try_recv() {
            heard.extend(self.port.filter_event(event).map(|event| text(&event.kind)));
        }
        heard
    }
}

fn text(kind: &PortEventKind) -> String {
    match kind {
        PortEventKind::Event(event, _) => match event {
            Event::Ready(ready) => format!("ready, pid {}", ready.pid),
            Event::ProgramLoaded(loaded) => format!("loaded {}", loaded.program),
            Event::ProgramFailed(failed) => format!("failed {}: {}", failed.program, failed.message),
            Event::CopyDone(done) => format!("copied {}", done.batch),
            Event::CopyFailed(failed) => format!("not copied {}", failed.batch),
            Event::RunDone(done) => format!("ran {}", done.run),
            Event::RunFailed(failed) => format!("not run {}", failed.run),
            Event::RunCancelled(cancelled) => format!("cancelled {}", cancelled.run),
            other => format!("{other:?}"),
        },
        PortEventKind::Exited { .. } => "gone".to_owned(),
        PortEventKind::ProgramUp { program, pid } => format!("up {program}, pid {pid}"),
        PortEventKind::ProgramLost { program, .. } => format!("lost {program}"),
        PortEventKind::SpawnFailed { message } => format!("no place: {message}"),
        PortEventKind::Part(..) => "a part".to_owned(),
    }
}

fn load(program: u64) -> Command {
    Command::LoadProgram(LoadProgram { program, ..Default::default() })
}

fn run(run: u64, program: u64) -> Command {
    Command::Run(Run { run, program, ..Default::default() })
}

fn copy(batch: u64, program: u64) -> Command {
    Command::Copy(Copy { batch, program, ..Default::default() })
}

fn event(event: Event) -> PortEventKind {
    PortEventKind::Event(event, Vec::new())
}

fn loaded(program: u64) -> PortEventKind {
    event(Event::ProgramLoaded(ProgramLoaded { program, took_ns: 0 }))
}

fn ran(run: u64) -> PortEventKind {
    event(Event::RunDone(RunDone { run, ..Default::default() }))
}

fn exited() -> PortEventKind {
    PortEventKind::Exited { status: "signal: 9".to_owned() }
}

fn to(number: u32, what: &[&str]) -> Vec<(u32, String)> {
    what.iter().map(|what| (number, (*what).to_owned())).collect()
}

#[test]
fn a_program_is_loaded_in_a_process_of_its_own_that_knows_the_peers() {
    let mut bench = Bench::new();
    bench.send(Command::AddPeer(AddPeer { gpu: 1, ..Default::default() }));
    bench.send(load(10));
    assert_eq!(bench.log(), to(1, &["start 1", "peer 1", "load 10"]));
    let ready = Ready { pid: 77, ..Default::default() };
    bench.says(1, event(Event::Ready(ready)));
    assert_eq!(bench.heard(), ["up 10, pid 77"]);
    bench.send(Command::ForgetPeer(ForgetPeer { gpu: 1 }));
    bench.send(load(20));
    bench.send(Command::Map(Map { program: 10, ..Default::default() }));
    let expected = [to(1, &["forget 1"]), to(2, &["start 1", "load 20"]), to(1, &["map 10"])].concat();
    assert_eq!(bench.log(), expected);
}

#[test]
fn one_process_runs_at_a_time() {
    let mut bench = Bench::two();
    for command in [run(1, 10), run(2, 10), run(3, 20), run(4, 20)] {
        bench.send(command);
    }
    assert_eq!(bench.log(), to(1, &["run 1", "run 2"]));
    bench.send(Command::Cancel(Cancel { run: 4 }));
    bench.send(Command::Cancel(Cancel { run: 2 }));
    assert_eq!(bench.log(), to(1, &["cancel 2"]));
    bench.says(1, ran(1));
    assert_eq!(bench.heard(), ["cancelled 4", "ran 1"]);
    assert_eq!(bench.log(), []);
    bench.says(1, event(Event::RunCancelled(RunCancelled { run: 2 })));
    assert_eq!(bench.heard(), ["cancelled 2"]);
    assert_eq!(bench.log(), to(2, &["run 3"]));
}

#[test]
fn outstanding_commands_of_a_dead_process_fail_and_the_other_process_goes_on() {
    let mut bench = Bench::two();
    for command in [copy(5, 10), copy(6, 20), run(1, 10), run(2, 20)] {
        bench.send(command);
    }
    assert_eq!(bench.log(), [to(1, &["copy 5"]), to(2, &["copy 6"]), to(1, &["run 1"])].concat());
    bench.says(1, exited());
    let heard = bench.heard();
    assert_eq!(heard, ["lost 10", "not copied 5", "not run 1"], "the loss is reported first");
    assert_eq!(bench.log(), to(2, &["run 2"]));
    bench.send(copy(7, 10));
    bench.send(run(3, 10));
    bench.says(2, event(Event::CopyDone(CopyDone { batch: 6, ..Default::default() })));
    assert_eq!(bench.heard(), ["not copied 7", "not run 3", "copied 6"]);
    bench.send(load(10));
    assert_eq!(bench.log(), to(3, &["start 1", "load 10"]));
}

#[test]
fn unloading_a_program_kills_its_process_without_an_event() {
    let mut bench = Bench::two();
    bench.send(Command::UnloadProgram(UnloadProgram { program: 10 }));
    bench.send(load(10));
    assert_eq!(bench.log(), [to(1, &["kill"]), to(3, &["start 1", "load 10"])].concat());
    bench.says(1, loaded(10));
    bench.says(1, exited());
    assert_eq!(bench.heard(), [""; 0]);
    bench.says(3, loaded(10));
    bench.port.kill_program(10);
    bench.says(3, exited());
    assert_eq!(bench.heard(), ["loaded 10", "lost 10"]);
    assert_eq!(bench.log(), to(3, &["kill"]));
}

#[test]
fn a_program_fails_if_its_process_cannot_start_or_cannot_load_it() {
    let mut bench = Bench::two();
    bench.send(load(30));
    bench.send(run(1, 30));
    bench.send(run(2, 20));
    bench.says(3, PortEventKind::SpawnFailed { message: "not found".to_owned() });
    assert_eq!(bench.heard(), ["failed 30: cannot start the program's executor: not found", "not run 1"]);
    bench.says(2, ran(2));
    bench.send(load(40));
    let message = "bad graph".to_owned();
    bench.says(4, event(Event::ProgramFailed(ProgramFailed { program: 40, message })));
    bench.log();
    assert_eq!(bench.heard(), ["ran 2", "failed 40: bad graph"]);
    assert_eq!(bench.log(), to(4, &["kill"]));
}

#[test]
fn the_killed_port_ends_with_the_last_of_its_processes() {
    let mut bench = Bench::two();
    bench.send(Command::Shutdown(Shutdown {}));
    bench.port.kill();
    bench.port.kill();
    bench.says(2, exited());
    bench.says(2, loaded(20));
    assert_eq!(bench.heard(), [""; 0]);
    bench.says(1, exited());
    assert_eq!(bench.heard(), ["gone"]);
    bench.port.start(Incarnation(2));
    assert_eq!(bench.heard(), ["ready, pid 0"]);
    assert_eq!(bench.port.memory().unwrap().bytes, Bytes(2), "the next incarnation has fresh memory");
    bench.port.kill();
    assert_eq!(bench.heard(), ["gone"], "a port without processes ends at once");
    bench.port.parts.refuse = true;
    bench.port.start(Incarnation(3));
    assert_eq!(bench.heard(), ["no place: no memory"]);
}
