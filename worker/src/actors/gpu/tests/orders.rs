//! Opaque programs: from where they come, and in which order.

use std::num::NonZeroU64;

use millrace_proto::executor::{ByteRange, LaunchReads};

use super::*;

const OPAQUE: ModelId = ModelId(2);
const MIB: u64 = 1 << 20;

fn bench() -> Bench {
    let mut bench = Bench::new();
    let memory = Bytes::mib(4);
    let declared = Arc::into_inner(prepared(memory)).unwrap();
    let opaque = PreparedModel { opaque_block: NonZeroU64::new(MIB), ..declared };
    bench.tell(Message::Install { model: OPAQUE, memory, prepared: Arc::new(opaque) });
    bench
}

/// A launch that reads so much from there on.
fn reads(offset_mib: u64, mib: u64) -> LaunchReads {
    LaunchReads { ranges: vec![ByteRange { offset: offset_mib * MIB, bytes: mib * MIB }] }
}

fn backwards() -> Vec<LaunchReads> {
    vec![reads(2, 2), reads(0, 2)]
}

fn order(first_reads: &[LaunchReads]) -> CopyOrder {
    CopyOrder::new(first_reads, Bytes::mib(4), NonZeroU64::new(MIB).unwrap()).unwrap()
}

/// The runs that the executor was given, and the orders in which mappings are filled.
async fn given(bench: &mut Bench) -> (Vec<RunId>, Vec<(ModelId, Option<Arc<CopyOrder>>)>) {
    let (mut runs, mut orders) = (Vec::new(), Vec::new());
    for message in bench.executor.told().await {
        match message {
            executor::Message::Send { command: Command::Run(run), .. } => runs.push(RunId(run.run)),
            executor::Message::CopyOrder { model, order, .. } => orders.push((model, order)),
            _ => {}
        }
    }
    (runs, orders)
}

#[test]
fn what_was_recorded_is_the_order_of_the_next_mapping() {
    in_actors(async {
        let mut bench = bench();
        bench.assign(1, OPAQUE.0, Vec::new());
        let (runs, orders) = given(&mut bench).await;
        assert_eq!(orders, [(OPAQUE, None)], "nothing is known");
        let event = Event::RunDone { run: runs[0], started: NOW, finished: NOW, waited: Duration::ZERO };
        let (run, times, outputs) = (runs[0], Vec::new(), Outputs::default());
        bench.tell(Message::RunDone { run, times, event, outputs, first_reads: backwards() });
        let recorded = |message| match message {
            node::Message::Recorded { model, order } => Some((model, order)),
            _ => None,
        };
        let order = Arc::new(order(&backwards()));
        let told: Vec<_> = bench.node.told().await.into_iter().filter_map(recorded).collect();
        assert_eq!(told, [(OPAQUE, Arc::clone(&order))]);

        bench.tell(Message::Event(Event::Down));
        bench.tell(Message::Up { incarnation: INCARNATION, pid: 2 });
        bench.assign(2, OPAQUE.0, Vec::new());
        bench.assign(3, 0, Vec::new());
        assert_eq!(given(&mut bench).await.1, [(OPAQUE, Some(order))], "and nothing of the other model");
    });
}

#[test]
fn reads_outside_the_program_are_not_used() {
    in_actors(async {
        let mut bench = bench();
        bench.assign(1, OPAQUE.0, Vec::new());
        let run = given(&mut bench).await.0[0];
        let event = Event::RunDone { run, started: NOW, finished: NOW, waited: Duration::ZERO };
        let (times, outputs, first_reads) = (Vec::new(), Outputs::default(), vec![reads(3, 2)]);
        bench.tell(Message::RunDone { run, times, event, outputs, first_reads });
        let told = bench.node.told().await;
        assert!(!told.iter().any(|message| matches!(message, node::Message::Recorded { .. })));
    });
}

#[test]
fn what_an_executor_records_that_is_new_to_a_program_adds_to_what_is_known() {
    in_actors(async {
        let mut bench = bench();
        // Another GPU's executor told of it.
        bench.tell(Message::CopyOrder { model: OPAQUE, order: Arc::new(order(&backwards())) });
        bench.assign(1, OPAQUE.0, Vec::new());
        let run = given(&mut bench).await.0[0];
        let event = Event::RunDone { run, started: NOW, finished: NOW, waited: Duration::ZERO };
        let (times, outputs, first_reads) = (Vec::new(), Outputs::default(), vec![reads(1, 1)]);
        bench.tell(Message::RunDone { run, times, event, outputs, first_reads });
        let recorded = |message| match message {
            node::Message::Recorded { order, .. } => Some(order),
            _ => None,
        };
        let told: Vec<_> = bench.node.told().await.into_iter().filter_map(recorded).collect();
        let first = [reads(1, 1), reads(2, 2)].map(|reads| reads.ranges).concat();
        assert_eq!(told, [Arc::new(order(&[LaunchReads { ranges: first }, reads(0, 1)]))]);
    });
}

#[test]
fn an_opaque_program_comes_from_the_host_whoever_has_it() {
    in_actors(async {
        for (model, expected) in [(ModelId(0), Some(OTHER)), (OPAQUE, None)] {
            let mut bench = bench();
            bench.assign_from(1, model.0, Vec::new(), Some(OTHER));
            let source = |message| match message {
                node::Message::Transfer { cargo: Cargo::Weights(_), from, .. } => Some(from),
                _ => None,
            };
            let sources: Vec<_> = bench.node.told().await.into_iter().filter_map(source).collect();
            assert_eq!(sources, [expected], "{model:?}");
        }
    });
}
