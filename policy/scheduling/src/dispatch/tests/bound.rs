use super::*;
use millrace_core::attempts::ReturnReason;

/// Returns a node of 64 MiB GPUs with a runtime of 20 MiB for each function.
fn early(binding: BindingLifetime, cold_ms: u64, gpus: usize) -> Node {
    let cold_start = Duration::from_millis(cold_ms);
    let policy = PolicyConfig::Bound(BoundConfig { binding, runtime: Bytes::mib(20), cold_start });
    let gpus = vec![GpuConfig::new(Bytes::mib(64), BytesPerSec::gb(1)); gpus];
    node_of(&Config::new(gpus, 100).with_policy(policy, 1))
}

impl Node {
    fn at_wake(&mut self) -> Vec<Action> {
        self.now = self.dispatch.next_wake().unwrap();
        self.step(Event::Tick)
    }
}

#[test]
fn a_bound_function_waits_for_its_gpu_while_others_idle() {
    let mut node = early(BindingLifetime::ForGood, 0, 2);
    assert_eq!(node.ask(1, 1, A), [assign(0, 1, A)]);
    assert_eq!(node.ask(2, 1, A), [], "GPU 1 is idle");
    assert_eq!(node.ask(3, 2, A), [assign(1, 3, A)], "the GPU with most free memory");
    assert_eq!(node.ended(0, 1, 5), [assign(0, 2, A)]);
}

#[test]
fn a_function_without_memory_beside_permanent_bindings_is_refused() {
    let mut node = early(BindingLifetime::ForGood, 0, 1);
    for function in 1..=2 {
        node.ask(function.into(), function, A);
    }
    // Each function holds 28 MiB.
    assert_eq!(node.ask(3, 3, B), [fail(3, Reason::NoGpuMemory, false)]);
    assert_eq!(node.step(Event::FunctionRemoved { function: FunctionIndex(1) }), []);
    assert_eq!(node.ask(4, 3, B), [], "a removed function freed its memory");
    assert_eq!(node.dispatch.queued(), 2);
}

#[test]
fn a_cold_start_comes_before_the_first_request_only() {
    let mut node = early(BindingLifetime::ForGood, 50, 1);
    assert_eq!(node.ask(1, 1, A), []);
    assert_eq!(node.ask(2, 1, A), []);
    assert_eq!(node.dispatch.next_wake(), Some(node.now + Duration::from_millis(50)));
    assert_eq!(node.at_wake(), [assign(0, 1, A)]);
    assert_eq!(node.ended(0, 1, 5), [assign(0, 2, A)]);
    assert_eq!(node.ended(0, 2, 5), []);
    assert_eq!(node.ask(3, 1, A), [assign(0, 3, A)]);
}

#[test]
fn an_expired_keep_alive_frees_memory_and_costs_another_cold_start() {
    let mut node = early(BindingLifetime::KeepAlive(Duration::from_millis(100)), 50, 1);
    node.ask(1, 1, A);
    node.ask(2, 2, A);
    assert_eq!(node.at_wake(), [assign(0, 1, A)]);
    assert_eq!(node.ended(0, 1, 5), [assign(0, 2, A)]);
    node.ended(0, 2, 5);
    assert_eq!(node.ask(3, 3, B), [], "no free memory");
    assert_eq!(node.at_wake(), [], "the idle functions expired");
    assert_eq!(node.at_wake(), [assign(0, 3, B)], "the cold start of 50 ms is over");
}

#[test]
fn functions_of_a_lost_gpu_are_bound_again() {
    let mut node = early(BindingLifetime::ForGood, 0, 2);
    assert_eq!(node.ask(1, 1, A), [assign(0, 1, A)]);
    assert_eq!(node.ask(2, 1, A), []);
    assert_eq!(node.down(0, &[(1, AttemptProgress::Waiting)]), [assign(1, 1, A)]);
    assert_eq!(node.ended(1, 1, 5), [assign(1, 2, A)]);
}

#[test]
fn a_function_without_memory_does_not_delay_others() {
    let keep_alive = BindingLifetime::KeepAlive(Duration::from_millis(100));
    let mut node = early(keep_alive, 0, 1);
    let wide = ModelId(4);
    node.step(Event::Install { model: wide, memory: Bytes::mib(24), weights: Bytes::mib(24) });
    assert_eq!(node.ask(1, 1, A), [assign(0, 1, A)]);
    assert_eq!(node.ask(2, 2, wide), [], "44 MiB do not fit into 36 beside function 1");
    assert_eq!(node.ask(3, 3, B), [], "waits behind function 1");
    assert_eq!(node.ended(0, 1, 5), [assign(0, 3, B)], "does not wait behind function 2");
}

#[test]
fn a_withdrawn_request_restarts_the_keep_alive() {
    let mut node = early(BindingLifetime::KeepAlive(Duration::from_secs(1)), 50, 1);
    node.ask(1, 1, A);
    assert_eq!(node.at_wake(), [assign(0, 1, A)]);
    node.now = node.now + Duration::from_millis(300);
    assert_eq!(node.ask(2, 1, A), [], "the GPU is still busy");
    node.step(Event::Withdraw { key: RequestKey(2) });
    assert_eq!(node.dispatch.next_wake(), Some(node.now + Duration::from_secs(1)));
}

#[test]
fn a_moved_input_leaves_due_decisions_to_the_next_wake() {
    let mut node = early(BindingLifetime::ForGood, 50, 1);
    assert_eq!(node.ask(1, 1, A), []);
    node.now = node.now + Duration::from_millis(50);
    assert_eq!(node.step(Event::InputsMoved { key: RequestKey(1), inputs: InputLocations::NONE }), []);
    assert_eq!(node.at_wake(), [assign(0, 1, A)]);
}

#[test]
fn a_refused_request_that_had_begun_may_have_executed() {
    let mut node = early(BindingLifetime::ForGood, 0, 1);
    assert_eq!(node.ask(1, 1, A), [assign(0, 1, A)]);
    node.ask(2, 2, A);
    node.step(Event::FunctionRemoved { function: FunctionIndex(1) });
    node.ask(3, 3, A);
    // Each function holds 28 MiB, so the GPU is full without function 1.
    let failed = Event::RequestReturned {
        gpu: gpu(0),
        key: RequestKey(1),
        why: ReturnReason::Failed(AttemptProgress::Begun),
    };
    assert_eq!(node.step(failed), [fail(1, Reason::NoGpuMemory, true), assign(0, 2, A)]);
}
