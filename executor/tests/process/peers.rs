//! Tests models that are copied from another executor's GPU (T22).

use std::os::unix::process::ExitStatusExt as _;

use millrace_model::synth;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::*;
use rustix::process::Signal;

use crate::support::{Executor, Model, PAGE, x};

/// Incarnation of the executor that has the model.
const INCARNATION: u64 = 7;

struct Pair {
    model: Model,
    input: Vec<Tensor>,
    /// Executor that has the model, copied from the host.
    source: Executor,
    /// Executor with a mapping for the model, but without its bytes.
    target: Executor,
    answer: Vec<u8>,
}

fn pair() -> Pair {
    let model = Model::new(synth::tiny_cnn());
    let input = x(&[1, 3, 32, 32]);
    let mut source = Executor::with(&model, 1);
    source.map(&model, 1, 1, 2 * PAGE);
    let batch = source.grant(1, 1, &model.all());
    source.copied(batch).unwrap();
    source.run(1, 1, 1, input.clone());
    let answer = source.ran(1).unwrap().bytes();
    let target = Executor::with(&model, 1);
    target.map(&model, 1, 1, 0);
    target.add_peer(&source.memory, INCARNATION);
    Pair { model, input, source, target, answer }
}

/// Returns the position of the model on the source, in two pieces.
fn there(model: &Model) -> PeerSource {
    let first = Extent { range_offset: 0, device_offset: 2 * PAGE, bytes: 3 * PAGE };
    let bytes = model.pages() - first.bytes;
    let second = Extent { range_offset: first.bytes, device_offset: 5 * PAGE, bytes };
    PeerSource { gpu: 1, incarnation: INCARNATION, extents: vec![first, second] }
}

#[test]
fn a_model_copied_from_a_peer_gives_the_same_outputs_as_from_the_host() {
    let Pair { model, input, source: _source, mut target, answer } = pair();
    target.run(1, 1, 1, input);
    let batch = target.grant_from(there(&model), &model, 1);
    assert_eq!(target.copied(batch).unwrap().bytes, model.bytes());
    assert_eq!(target.ran(1).unwrap().bytes(), answer);
}

#[test]
fn a_copy_from_a_peer_reads_the_device_memory_of_the_peer() {
    let Pair { model, input, mut source, mut target, answer } = pair();
    source.inject(Fault::CorruptDevice, 1);
    // This run ensures that the fault is carried out before the copy that follows.
    source.run(2, 1, 1, input.clone());
    source.ran(2).unwrap();
    let batch = target.grant_from(there(&model), &model, 1);
    target.copied(batch).unwrap();
    target.run(1, 1, 1, input);
    assert_ne!(target.ran(1).unwrap().bytes(), answer);
}

#[test]
fn an_unreadable_peer_fails_the_copy_but_not_the_waiting_run() {
    let Pair { model, input, source: _source, mut target, answer } = pair();
    target.run(1, 1, 1, input);
    let refused = |target: &mut Executor, peer| {
        let batch = target.grant_from(peer, &model, 1);
        assert_eq!(target.copy_failure(batch), CopyFailure::Peer);
    };
    refused(&mut target, PeerSource { incarnation: INCARNATION + 1, ..there(&model) });
    refused(&mut target, PeerSource { gpu: 2, ..there(&model) });
    target.inject(Fault::LosePeers, 0);
    refused(&mut target, there(&model));
    target.send(Command::ForgetPeer(ForgetPeer { gpu: 1 }));
    refused(&mut target, there(&model));
    let batch = target.grant(1, 1, &model.all());
    target.copied(batch).unwrap();
    assert_eq!(target.ran(1).unwrap().bytes(), answer);
    target.said_no_more();
}

#[test]
fn extents_that_are_incomplete_or_out_of_range_fail_the_copy() {
    let Pair { model, source: _source, mut target, .. } = pair();
    let with = |extent| PeerSource { extents: vec![extent], ..there(&model) };
    let bytes = model.pages();
    for (peer, failure) in [
        (with(Extent { range_offset: 0, device_offset: 0, bytes: PAGE }), CopyFailure::NotMapped),
        (with(Extent { range_offset: PAGE, device_offset: 0, bytes }), CopyFailure::NotMapped),
        (with(Extent { range_offset: 0, device_offset: u64::MAX - PAGE, bytes }), CopyFailure::Device),
    ] {
        let batch = target.grant_from(peer.clone(), &model, 1);
        assert_eq!(target.copy_failure(batch), failure, "{peer:?}");
    }
}

#[test]
fn the_memory_of_a_dead_peer_can_be_read_until_it_is_forgotten() {
    let Pair { model, input, mut source, mut target, answer } = pair();
    source.child.kill().unwrap();
    assert_eq!(source.child.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
    let batch = target.grant_from(there(&model), &model, 1);
    target.copied(batch).unwrap();
    target.run(1, 1, 1, input);
    assert_eq!(target.ran(1).unwrap().bytes(), answer);
}
