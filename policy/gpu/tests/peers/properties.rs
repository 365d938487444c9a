//! Properties of copies between GPUs for any events in any order.

use std::cell::Cell;

use millrace_gpu::ExecutorIsolation;
use millrace_memory::{BlockPlacement, BlockSize};
use millrace_transfers::fabric::BatchFailure;
use millrace_types::{Bytes, ModelId};
use proptest::prelude::*;

use crate::world::{GPUS, MODELS, World};

/// Seats of a GPU, at most.
const SEATS: u32 = 3;

#[derive(Debug, Clone, Copy)]
enum Step {
    Assign { gpu: usize, seat: u32, model: u32, from: Option<usize> },
    Prefetch { gpu: usize, model: u32 },
    Deliver(usize),
    Copy(usize),
    FailCopy(usize),
    LateCopy(usize),
    Wait,
    Run(usize),
    Cancel(usize),
    Kill(usize),
    KillProgram { gpu: usize, model: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    let from = prop_oneof![1 => Just(None), 4 => (0..GPUS).prop_map(Some)];
    prop_oneof![
        6 => (0..GPUS, 0..SEATS, 0..MODELS, from)
            .prop_map(|(gpu, seat, model, from)| Step::Assign { gpu, seat, model, from }),
        2 => (0..GPUS, 0..MODELS).prop_map(|(gpu, model)| Step::Prefetch { gpu, model }),
        30 => any::<usize>().prop_map(Step::Deliver),
        15 => (0..GPUS).prop_map(Step::Copy),
        1 => (0..GPUS).prop_map(Step::FailCopy),
        1 => (0..GPUS).prop_map(Step::LateCopy),
        4 => Just(Step::Wait),
        10 => (0..GPUS).prop_map(Step::Run),
        1 => (0..GPUS).prop_map(Step::Cancel),
        1 => (0..GPUS).prop_map(Step::Kill),
        2 => (0..GPUS, 0..MODELS).prop_map(|(gpu, model)| Step::KillProgram { gpu, model }),
    ]
}

/// Runs the system until no message, copy, run or timer is left.
fn drain(world: &mut World) {
    for _ in 0..10_000 {
        let mut busy = world.deliver(0);
        for gpu in 0..GPUS {
            busy |= world.copy(gpu) | world.run(gpu);
        }
        world.check();
        if !busy && !world.wait() {
            return;
        }
    }
    panic!("the system does not come to rest");
}

/// T25: a source is not evicted before its copy has ended, so that every run reads its own model.
/// Every request ends, whichever executors die.
#[test]
fn copies_read_only_their_own_model_and_every_request_ends() {
    let from_peers = Cell::new(0);
    let placement = prop_oneof![Just(BlockPlacement::Scattered), Just(BlockPlacement::Contiguous)];
    let isolation = prop_oneof![
        Just(ExecutorIsolation::Gpu),
        Just(ExecutorIsolation::Model),
        Just(ExecutorIsolation::Resident)
    ];
    proptest!(ProptestConfig::with_cases(768), |(
        isolation in isolation,
        placement in placement,
        block in prop_oneof![2 => Just(2), 1 => Just(16)],
        seats in 1..=SEATS,
        steps in prop::collection::vec(step(), 1..400),
    )| {
        let mut world = World::new(isolation, placement, BlockSize::new(Bytes::mib(block)).unwrap());
        for step in steps {
            match step {
                Step::Assign { gpu, seat, model, from } => world.assign(gpu, seat % seats, ModelId(model), from),
                Step::Prefetch { gpu, model } => world.prefetch(gpu, ModelId(model)),
                Step::Deliver(which) => drop(world.deliver(which)),
                Step::Copy(gpu) => drop(world.copy(gpu)),
                Step::FailCopy(gpu) => drop(world.fail_copy(gpu, BatchFailure::Faulty)),
                Step::LateCopy(gpu) => drop(world.fail_copy(gpu, BatchFailure::NotBegun)),
                Step::Wait => drop(world.wait()),
                Step::Run(gpu) => drop(world.run(gpu)),
                Step::Cancel(gpu) => world.cancel(gpu),
                Step::Kill(gpu) => world.kill(gpu),
                // Models that share a process have no program process to kill.
                Step::KillProgram { .. } if isolation == ExecutorIsolation::Gpu => {}
                Step::KillProgram { gpu, model } => world.kill_program(gpu, ModelId(model)),
            }
            world.check();
        }
        drain(&mut world);
        world.check_idle();
        from_peers.set(from_peers.get() + world.from_peers);
    });
    assert!(from_peers.get() > 1_000, "{} chunks came from peers: the test shows little", from_peers.get());
}
