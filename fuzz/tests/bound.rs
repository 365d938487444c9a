//! A test of the bound on the heap. The file has only one test, because the peak of the heap is that of the
//! whole process.

use millrace_fuzz::{Target, corpus, target};
use millrace_proto::inference::ModelInferRequest;
use prost::Message as _;

/// The targets would find this attack if decoding had no bound on memory.
#[test]
fn an_attack_of_the_corpus_exceeds_the_heap_bound_without_decoding_limits() {
    let unbounded = Target { name: "prost alone", read: |message| drop(ModelInferRequest::decode(message)) };
    let tensors = corpus::of(target("grpc_request"))
        .into_iter()
        .find(|input| input.len() == 2 << 20 && input.starts_with(&[0x2a, 0x00]))
        .expect("the corpus has an attack of tensors without fields");
    let broken = std::panic::catch_unwind(|| unbounded.run(&tensors));
    assert!(broken.is_err());
}
