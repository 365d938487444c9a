//! The bound on the heap itself. One test: the heap's peak is counted for the whole process.

use millrace_fuzz::{Target, corpus, target};
use millrace_proto::inference::ModelInferRequest;
use prost::Message as _;

/// What the targets would find if nothing bounded the memory that decoding takes.
#[test]
fn an_attack_of_the_corpus_breaks_the_bound_without_the_walk() {
    let unbounded = Target { name: "prost alone", read: |message| drop(ModelInferRequest::decode(message)) };
    let tensors = corpus::of(target("grpc_request"))
        .into_iter()
        .find(|input| input.len() == 2 << 20 && input.starts_with(&[0x2a, 0x00]))
        .expect("tensors without fields");
    let broken = std::panic::catch_unwind(|| unbounded.run(&tensors));
    assert!(broken.is_err());
}
