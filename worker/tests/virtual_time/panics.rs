//! A panic in an actor costs answers, but never leaves a request without one. A subscriber that
//! panics at a span stands for a bug in the actor that opens the span. A port that panics stands
//! for a bug in the Executor actor.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millrace_proto::executor::command::Command;
use millrace_types::{Bytes, GpuIndex, Incarnation, Reason};
use millrace_worker::node::NodeConfig;
use millrace_worker::port::{Descriptor, ExecutorPort, PortFactory, PortSink};
use tracing::span;

use crate::world::{World, behaviour, gpus, in_virtual_time, request};

/// A subscriber that panics once at a span or an event of this name.
#[derive(Clone)]
struct Bug {
    name: &'static str,
    armed: Arc<AtomicBool>,
}

impl Bug {
    fn at(name: &'static str) -> Self {
        Self { name, armed: Arc::new(AtomicBool::new(false)) }
    }

    fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
    }

    fn strike(&self, name: &str) {
        assert!(!(name == self.name && self.armed.swap(false, Ordering::Relaxed)), "a bug at {name:?}");
    }

    fn struck(&self) -> bool {
        !self.armed.load(Ordering::Relaxed)
    }
}

impl tracing::Subscriber for Bug {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
        self.strike(attributes.metadata().name());
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        if event.metadata().target().ends_with("function") {
            self.strike("answer");
        }
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// Gives two GPUs work and then panics in the actor that opens `name`. Returns the reasons of the
/// requests that failed, and checks that the node serves afterwards.
fn strike(name: &'static str) -> Vec<Reason> {
    let bug = Bug::at(name);
    // With a single subscriber in the process, tracing caches the interest of the thread that
    // reaches a callsite first. A concurrent test without a subscriber would then disable the
    // callsite for all threads.
    let _second = tracing::Dispatch::new(Bug::at("nothing"));
    let _guard = tracing::subscriber::set_default(bug.clone());
    in_virtual_time(async {
        let world = World::start(gpus(2), &behaviour(&[5, 5]));
        world.install(0, Bytes::mib(20)).await;
        world.install(1, Bytes::mib(20)).await;
        world.pass_ms(20).await;
        let mut answers: Vec<_> = (0..8).map(|number| world.ask(request(number % 2))).collect();
        world.pass_ms(2).await;
        bug.arm();
        answers.extend((0..8).map(|number| world.ask(request(number % 2))));
        let mut reasons = Vec::new();
        for answer in answers {
            reasons.extend(answer.await.unwrap().err().map(|failure| failure.reason));
        }
        assert!(bug.struck(), "no actor opened {name:?}: the test shows nothing");
        world.pass_ms(100).await;
        for number in 0..6 {
            world.node.invoke(request(number % 2)).await.unwrap();
        }
        let snapshot = world.node.snapshot().await;
        assert_eq!((snapshot.queued, snapshot.functions.len(), snapshot.gpus.len()), (0, 2, 2));
        assert!(
            snapshot.functions.iter().all(|function| function.in_flight == 0),
            "{:?}",
            snapshot.functions
        );
        reasons
    })
}

#[test]
fn a_gpu_that_panics_costs_latency_only() {
    assert_eq!(strike("run"), []);
}

#[test]
fn a_function_that_panics_answers_its_own_requests_with_an_error() {
    let reasons = strike("answer");
    assert!((1..=8).contains(&reasons.len()), "{reasons:?}");
    assert!(reasons.iter().all(|&reason| reason == Reason::Internal), "{reasons:?}");
}

#[test]
fn a_node_that_panics_answers_every_request_with_an_error_and_serves_again() {
    let reasons = strike("queue");
    assert!(!reasons.is_empty());
    assert!(reasons.iter().all(|&reason| reason == Reason::Internal), "{reasons:?}");
}

/// Ports that panic at their first command after `armed`.
struct Faulty {
    inner: Box<dyn PortFactory>,
    armed: Arc<AtomicBool>,
}

struct FaultyPort {
    inner: Box<dyn ExecutorPort>,
    armed: Arc<AtomicBool>,
}

impl PortFactory for Faulty {
    fn port(&mut self, gpu: GpuIndex, sink: PortSink) -> Box<dyn ExecutorPort> {
        Box::new(FaultyPort { inner: self.inner.port(gpu, sink), armed: Arc::clone(&self.armed) })
    }
}

impl ExecutorPort for FaultyPort {
    fn start(&mut self, incarnation: Incarnation) {
        self.inner.start(incarnation);
    }
    fn send(&mut self, command: Command, descriptors: Vec<Descriptor>) {
        assert!(!self.armed.swap(false, Ordering::Relaxed), "a bug in the port");
        self.inner.send(command, descriptors);
    }
    fn kill(&mut self) {
        self.inner.kill();
    }
}

#[test]
fn an_executor_actor_that_panics_costs_latency_only() {
    in_virtual_time(async {
        let armed = Arc::new(AtomicBool::new(false));
        let spawner = {
            let armed = Arc::clone(&armed);
            move |machine| -> Box<dyn PortFactory> { Box::new(Faulty { inner: Box::new(machine), armed }) }
        };
        let world = World::start_with(NodeConfig::new(gpus(2)), &behaviour(&[5]), 1, spawner);
        world.install(0, Bytes::mib(2)).await;
        world.pass_ms(20).await;
        let mut answers: Vec<_> = (0..6).map(|_| world.ask(request(0))).collect();
        world.pass_ms(2).await;
        armed.store(true, Ordering::Relaxed);
        answers.extend((0..6).map(|_| world.ask(request(0))));
        for answer in answers {
            answer.await.unwrap().unwrap();
        }
        assert!(!armed.load(Ordering::Relaxed));
        world.pass(Duration::from_millis(50)).await;
        let incarnations: Vec<_> =
            world.node.snapshot().await.gpus.into_iter().map(|gpu| gpu.incarnation.0).collect();
        assert!(incarnations.iter().any(|&incarnation| incarnation > 2), "{incarnations:?}");
    });
}
