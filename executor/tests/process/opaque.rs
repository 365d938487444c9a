//! Opaque programs: what launches read is known only when they are issued.
//!
//! They are made of models whose launches' reads are kept back at loading and come with each run, as
//! the calls of a redirected client would bring them. Behind the weights are blocks that nothing
//! reads unless a test says so.

use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::Duration;

use millrace_device::monotonic_now;
use millrace_model::order::ReadOrder;
use millrace_model::synth;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::*;

use crate::support::{Answer, Executor, Model, PAGE, byte_range, x};

const BLOCK: u64 = 64 << 10;
const PADDING: u64 = 4 * BLOCK;

type Reads = Vec<Vec<Range<u64>>>;

struct Opaque {
    model: Model,
    executor: Executor,
    generation: u64,
}

impl Opaque {
    fn load() -> Self {
        let model = Model::padded(synth::tiny_cnn(), PADDING);
        let mut executor = Executor::start();
        let (load, descriptors) = opaque(&model);
        crate::support::send(&executor.socket, Command::LoadProgram(load), descriptors);
        executor.expect(|event| matches!(event, Event::ProgramLoaded(_)).then_some(()));
        Self { model, executor, generation: 0 }
    }

    /// What its launches read.
    fn reads(&self) -> Reads {
        self.model.compiled.launches.iter().map(|launch| launch.reads.clone()).collect()
    }

    /// Gives it memory, elsewhere than before.
    fn map(&mut self) {
        self.generation += 1;
        self.executor.map(&self.model, 1, self.generation, self.generation * 64 * PAGE);
    }

    fn unmap(&mut self) {
        self.executor.unmap(1, self.generation);
    }

    fn copy(&mut self, range: Range<u64>) -> CopyDone {
        let batch = self.executor.grant(1, self.generation, &[range]);
        self.executor.copied(batch).unwrap()
    }

    fn start(&self, reads: &Reads) {
        self.executor.send(Command::Run(self.run(reads)));
    }

    fn run(&self, reads: &Reads) -> Run {
        let reads =
            reads.iter().map(|reads| LaunchReads { ranges: reads.iter().cloned().map(byte_range).collect() });
        let (generation, inputs, reads) = (self.generation, x(&[2, 3, 32, 32]), reads.collect());
        Run { run: 1, program: 1, generation, inputs, reads, ..Run::default() }
    }

    fn answer(&mut self) -> Answer {
        self.executor.ran(1).unwrap()
    }

    /// In which order to copy it, by what was recorded in a run; nothing where nothing was.
    fn copy_order(&self, answer: &Answer) -> Vec<Range<u64>> {
        let range = |range: &ByteRange| range.offset..range.offset + range.bytes;
        let launch = |reads: &LaunchReads| reads.ranges.iter().map(range).collect::<Vec<_>>();
        let reads: Reads = answer.done.first_reads.iter().map(launch).collect();
        if reads.is_empty() {
            return Vec::new();
        }
        let block = NonZeroU64::new(BLOCK).unwrap();
        ReadOrder::recorded(self.model.bytes(), block, &reads).unwrap().copy_order()
    }

    /// Runs while all of it is copied, in this order; then gives its memory away.
    fn swap(&mut self, reads: &Reads, order: &[Range<u64>]) -> (Vec<u8>, Vec<Range<u64>>) {
        self.map();
        self.start(reads);
        for range in order {
            self.copy(range.clone());
        }
        let answer = self.answer();
        self.unmap();
        (answer.bytes(), self.copy_order(&answer))
    }
}

fn opaque(model: &Model) -> (LoadProgram, Vec<OwnedFd>) {
    let (Command::LoadProgram(mut load), descriptors) = model.load(1) else { unreachable!() };
    load.opaque_block_bytes = BLOCK;
    load.launches.iter_mut().for_each(|launch| launch.reads.clear());
    (load, descriptors)
}

fn blocks(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let Range { start, end } = *range;
    (start..end).step_by(BLOCK as usize).map(move |start| start..end.min(start + BLOCK))
}

/// What a program that declares its reads answers.
fn declared(model: &Model) -> Vec<u8> {
    let mut executor = Executor::with(model, 1);
    executor.bring_in(model, 1, 1);
    executor.run(1, 1, 1, x(&[2, 3, 32, 32]));
    executor.ran(1).unwrap().bytes()
}

#[test]
fn the_first_run_waits_for_everything_and_the_second_for_what_it_reads() {
    let mut program = Opaque::load();
    let expected = declared(&program.model);
    let weights = program.model.compiled.summary.weights_bytes;
    let all = 0..program.model.bytes();
    // It touches its last block first.
    let mut reads = program.reads();
    reads[0].push(all.end - BLOCK..all.end);

    program.map();
    program.start(&reads);
    program.copy(0..weights);
    // Nothing reads most of this, yet the run waits for it.
    let opens = monotonic_now() + Duration::from_millis(30);
    let rest = weights..all.end;
    let batch = program.executor.grant_in(1, program.generation, &[rest], opens.0, u64::MAX);
    let rest = program.executor.copied(batch).unwrap();
    let first = program.answer();
    assert!(first.done.finished_ns >= rest.finished_ns, "it ran before all was there");
    assert_eq!(first.bytes(), expected);
    let order = program.copy_order(&first);
    let read_first = &first.done.first_reads[0].ranges;
    let last = read_first.last().map(|range| range.offset + range.bytes);
    assert_eq!(last, Some(all.end), "{read_first:?}");
    assert_eq!(order[0], 0..reads[0][0].end.next_multiple_of(BLOCK));
    assert_eq!(order[1].end, all.end, "{order:?}");
    assert_eq!(order.iter().map(|range| range.end - range.start).sum::<u64>(), all.end);
    program.unmap();

    // At another place, and what nothing reads never comes.
    program.map();
    program.start(&reads);
    let is_read = |block: &Range<u64>| {
        reads.iter().flatten().any(|read| read.start < block.end && block.start < read.end)
    };
    for block in order.iter().flat_map(blocks).filter(is_read) {
        program.copy(block);
    }
    let second = program.answer();
    assert_eq!((second.bytes(), program.copy_order(&second)), (expected, vec![]));
}

#[test]
fn an_opaque_program_that_is_loaded_and_known_runs_whole() {
    let mut program = Opaque::load();
    let (reads, all) = (program.reads(), 0..program.model.bytes());
    program.map();
    program.copy(all);
    program.start(&reads);
    let first = program.answer();
    assert_eq!(first.done.launches as usize, reads.len(), "it is tracked, loaded or not");
    program.start(&reads);
    let second = program.answer();
    assert_eq!((second.done.launches, program.copy_order(&second)), (1, vec![]));
    assert_eq!(first.bytes(), second.bytes());
}

#[test]
fn an_unexpected_read_waits_for_everything_answers_the_same_and_is_recorded() {
    let mut program = Opaque::load();
    let (reads, all) = (program.reads(), 0..program.model.bytes());
    let (expected, order) = program.swap(&reads, std::slice::from_ref(&all));
    assert!(!order.is_empty());
    let mut strays = reads.clone();
    strays.last_mut().unwrap().push(all.end - BLOCK..all.end);
    // On a machine that is busy enough all is copied before the run begins, and it runs whole.
    let recorded = (0..50).find_map(|_| {
        let (bytes, recorded) = program.swap(&strays, &order);
        assert_eq!(bytes, expected);
        Some(recorded).filter(|recorded| !recorded.is_empty())
    });
    let recorded = recorded.expect("a run that begins before its copies are done");
    assert_ne!(recorded, order);
    for reads in [&reads, &strays] {
        assert_eq!(program.swap(reads, &recorded), (expected.clone(), vec![]));
    }
}

#[test]
fn a_run_that_failed_records_nothing() {
    let mut program = Opaque::load();
    let (reads, all) = (program.reads(), 0..program.model.bytes());
    program.map();
    program.start(&reads);
    program.unmap();
    assert_eq!(program.executor.run_failure(1), RunFailure::NotResident);
    assert!(!program.swap(&reads, &[all]).1.is_empty());
}

#[test]
fn reads_that_do_not_fit_the_program_are_refused() {
    let mut program = Opaque::load();
    let (reads, all) = (program.reads(), 0..program.model.bytes());
    program.map();
    program.start(&reads[1..].to_vec());
    assert_eq!(program.executor.run_failure(1), RunFailure::Model);
    let mut outside = reads.clone();
    outside[0].push(all.end..all.end + 1);
    program.start(&outside);
    // It does not wait for what can never come.
    program.executor.ran(1).unwrap_err();
    program.copy(all);
    program.start(&reads);
    program.answer();

    let mut executor = Executor::with(&program.model, 1);
    executor.bring_in(&program.model, 1, 1);
    executor.send(Command::Run(Run { generation: 1, ..program.run(&reads) }));
    assert_eq!(executor.run_failure(1), RunFailure::Model);
    let (load, descriptors) = program.model.load(2);
    let Command::LoadProgram(load) = load else { unreachable!() };
    let message = executor.load_failure(LoadProgram { opaque_block_bytes: BLOCK, ..load }, descriptors);
    assert!(message.contains("declares what it reads"), "{message}");
}
