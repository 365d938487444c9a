//! Measures a gateway's cost of choosing a worker, with 1,000 functions on 100 nodes.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use millrace_controller::sim::RoutingFixture;

const FUNCTIONS: usize = 1_000;
const NODES: u64 = 100;

fn routing(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let _inside = runtime.enter();
    for replicas in [2, NODES] {
        let crowd = RoutingFixture::new(FUNCTIONS, NODES, replicas);
        let mut function = 0;
        criterion.bench_function(&format!("routing/{replicas} replicas"), |bencher| {
            bencher.iter(|| {
                function = (function + 1) % FUNCTIONS;
                black_box(crowd.route(function))
            });
        });
    }
}

criterion_group!(benches, routing);
criterion_main!(benches);
