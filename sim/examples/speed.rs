//! Measures the events that the simulator handles in a second: a node of four GPUs and 480 functions at the
//! rates of Torpor's artifact for ten minutes, with every event folded into a hash and without. Prints the
//! rate, and the events by kind of core.

use std::time::Instant;

use millrace_scheduling::dispatch::PolicyConfig;
use millrace_sim::models;
use millrace_sim::scenario::{ClusterScenario, SimulatedFunction, SimulatedNode};
use millrace_sim::workload::{minutes, rates};
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};

fn topology(gpus: u32, memory: Bytes, rate: BytesPerSec) -> Topology {
    let gpu = |index: u32| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "modelled".to_owned(),
        memory,
        host_path: vec![LinkId(index)],
    };
    let link = TopologyLink { kind: LinkKind::Pcie, rate };
    Topology {
        name: "speed".to_owned(),
        gpus: (0..gpus).map(gpu).collect(),
        links: vec![link; gpus as usize],
    }
}

#[expect(clippy::disallowed_methods, reason = "measures the wall clock")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let torpor = models::torpor();
    let functions: Vec<_> =
        (0..480).map(|place| SimulatedFunction::new(torpor[place % torpor.len()].clone(), None)).collect();
    let arrivals = minutes::arrivals(&rates::by_minute(&rates::torpor(), 480, 10, 0), 1);
    let node = SimulatedNode::new(topology(4, Bytes::gib(25), models::TORPOR_PCIE), PolicyConfig::Fifo);
    let mut scenario = ClusterScenario::new(vec![node], functions, arrivals, 1);
    for traced in [true, false] {
        scenario.traced = traced;
        let began = Instant::now();
        let outcome = millrace_sim::run(&scenario)?;
        let took = began.elapsed();
        let (events, hash) = outcome.events();
        println!(
            "traced {traced}: {} requests, {events} events, {:.0} events/s, {took:.2?}, hash {hash:016x}, {:?}",
            outcome.records.len(),
            events as f64 / took.as_secs_f64(),
            outcome.events_by_core()
        );
        println!("{:?}", outcome.summary(&scenario.functions));
    }
    Ok(())
}
