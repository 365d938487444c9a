//! Models copied from another executor's GPU (T22).

use std::os::unix::process::ExitStatusExt as _;

use millrace_model::synth;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::*;
use rustix::process::Signal;

use crate::support::{Executor, Model, PAGE, x};

/// Of the executor that has the model.
const INCARNATION: u64 = 7;

struct Pair {
    model: Model,
    input: Vec<Tensor>,
    /// Has it, from the host.
    source: Executor,
    /// Has room for it.
    target: Executor,
    answer: Vec<u8>,
}

fn pair() -> Pair {
    let (model, input) = (Model::new(synth::tiny_cnn()), x(&[1, 3, 32, 32]));
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

/// Where the source has the model, in two pieces.
fn there(model: &Model) -> PeerSource {
    let first = Extent { range_offset: 0, device_offset: 2 * PAGE, bytes: 3 * PAGE };
    let bytes = model.pages() - first.bytes;
    let second = Extent { range_offset: first.bytes, device_offset: 5 * PAGE, bytes };
    PeerSource { gpu: 1, incarnation: INCARNATION, extents: vec![first, second] }
}

#[test]
fn a_model_copied_from_a_peer_gives_the_answer_of_one_copied_from_the_host() {
    let Pair { model, input, source: _source, mut target, answer } = pair();
    target.run(1, 1, 1, input);
    let batch = target.grant_from(there(&model), &model, 1);
    assert_eq!(target.copied(batch).unwrap().bytes, model.bytes());
    assert_eq!(target.ran(1).unwrap().bytes(), answer);
}

#[test]
fn what_is_read_is_the_peers_device_memory_and_nothing_else() {
    let Pair { model, input, mut source, mut target, answer } = pair();
    source.inject(Fault::CorruptDevice, 1);
    // The fault comes before this, and so before what is copied afterwards.
    source.run(2, 1, 1, input.clone());
    source.ran(2).unwrap();
    let batch = target.grant_from(there(&model), &model, 1);
    target.copied(batch).unwrap();
    target.run(1, 1, 1, input);
    assert_ne!(target.ran(1).unwrap().bytes(), answer);
}

#[test]
fn a_peer_that_cannot_be_read_fails_the_copy_and_not_the_run_that_waits_for_it() {
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
fn extents_that_do_not_cover_a_copy_or_are_not_there_fail_it() {
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
fn a_dead_peers_memory_can_be_read_until_it_is_forgotten() {
    let Pair { model, input, mut source, mut target, answer } = pair();
    source.child.kill().unwrap();
    assert_eq!(source.child.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
    let batch = target.grant_from(there(&model), &model, 1);
    target.copied(batch).unwrap();
    target.run(1, 1, 1, input);
    assert_eq!(target.ran(1).unwrap().bytes(), answer);
}
