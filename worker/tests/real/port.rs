//! A process port for tests, on an actor thread of its own and without actors.

use std::sync::mpsc;
use std::thread::JoinHandle;

use millrace_device::monotonic_now;
use millrace_proto::executor::event::Event;
use millrace_types::{GpuIndex, Incarnation, Timestamp};
use millrace_worker::port::{PortEvent, PortEventKind, PortFactory as _, PortSink};
use millrace_worker::process_port::{ExecutorCommand, ProcessSpawner};
use tokio::sync::mpsc as async_mpsc;

use crate::support::{EXECUTOR_VARIABLE, this_program_as, topology, within};

enum Order {
    Start(Incarnation),
    Kill,
}

/// A port on an actor thread of its own, and its events with their times of delivery.
pub(crate) struct Port {
    orders: Option<async_mpsc::UnboundedSender<Order>>,
    events: async_mpsc::UnboundedReceiver<(Timestamp, PortEvent)>,
    incarnation: Incarnation,
    thread: Option<JoinHandle<()>>,
}

impl Port {
    /// Starts a port to real executors.
    pub(crate) fn start() -> Self {
        let (program, args) = this_program_as("executor_child");
        Self::to(ExecutorCommand { program, args, envs: vec![(EXECUTOR_VARIABLE.into(), "1".into())] })
    }

    /// Starts a port to a shell that runs this script; the socket is its standard input.
    pub(crate) fn to_script(script: &str) -> Self {
        Self::to(ExecutorCommand {
            program: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            envs: Vec::new(),
        })
    }

    pub(crate) fn to(command: ExecutorCommand) -> Self {
        let (orders, mut ordered) = async_mpsc::unbounded_channel();
        let (told, events) = async_mpsc::unbounded_channel();
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            actix_rt::System::new().block_on(async move {
                let sink = PortSink::new(move |event| drop(told.send((monotonic_now(), event))));
                let mut port = ProcessSpawner::new(command, &topology(1), 1, true).port(GpuIndex(0), sink);
                ready.send(()).unwrap();
                while let Some(order) = ordered.recv().await {
                    match order {
                        Order::Start(incarnation) => port.start(incarnation),
                        Order::Kill => port.kill(),
                    }
                }
            });
        });
        is_ready.recv().unwrap();
        let port = Self { orders: Some(orders), events, incarnation: Incarnation(1), thread: Some(thread) };
        port.order(Order::Start(Incarnation(1)));
        port
    }

    fn order(&self, order: Order) {
        self.orders.as_ref().unwrap().send(order).map_err(drop).unwrap();
    }

    pub(crate) fn kill(&self) {
        self.order(Order::Kill);
    }

    pub(crate) async fn next(&mut self) -> (Timestamp, PortEventKind) {
        let (at, event) = within("an event of the port", self.events.recv()).await.unwrap();
        assert_eq!(event.incarnation, self.incarnation);
        (at, event.kind)
    }

    /// Waits until the executor is ready. Returns the pid that it reports.
    pub(crate) async fn until_ready(&mut self) -> u32 {
        match self.next().await.1 {
            PortEventKind::Event(Event::Ready(ready), _) => ready.pid,
            other => panic!("{other:?}"),
        }
    }

    /// Waits for the end of the executor and starts the next incarnation. Returns the time of the
    /// report.
    pub(crate) async fn until_exited(&mut self) -> Timestamp {
        let (at, _) = self.exit().await;
        self.incarnation.0 += 1;
        self.order(Order::Start(self.incarnation));
        at
    }

    /// Waits for the end of the executor. Returns its time and its status.
    pub(crate) async fn exit(&mut self) -> (Timestamp, String) {
        match self.next().await {
            (at, PortEventKind::Exited { status }) => (at, status),
            (_, other) => panic!("{other:?}"),
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}
