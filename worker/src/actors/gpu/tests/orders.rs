//! Opaque programs: from where they come, and in which order.

use std::num::NonZeroU64;

use millrace_proto::executor::ByteRange;

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

fn backwards() -> Vec<ByteRange> {
    [2, 0].map(|mib| ByteRange { offset: mib * MIB, bytes: 2 * MIB }).to_vec()
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
        bench.tell(Message::RunDone { run, times, event, outputs, copy_order: backwards() });
        let recorded = |message| match message {
            node::Message::Recorded { model, order } => Some((model, order)),
            _ => None,
        };
        let order = Arc::new(CopyOrder::new(&backwards(), Bytes::mib(4)).unwrap());
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
fn an_order_that_lacks_bytes_is_not_used() {
    in_actors(async {
        let mut bench = bench();
        bench.assign(1, OPAQUE.0, Vec::new());
        let run = given(&mut bench).await.0[0];
        let event = Event::RunDone { run, started: NOW, finished: NOW, waited: Duration::ZERO };
        let (times, outputs, copy_order) = (Vec::new(), Outputs::default(), backwards()[..1].to_vec());
        bench.tell(Message::RunDone { run, times, event, outputs, copy_order });
        let told = bench.node.told().await;
        assert!(!told.iter().any(|message| matches!(message, node::Message::Recorded { .. })));
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
