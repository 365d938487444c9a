//! Runs a simulation event by event, until every request was answered.

use millrace_memory::elastic::Event;
use millrace_types::Timestamp;

use super::error::Error;
use super::fabric::{FluidFabric, GpuSite};
use super::instances::{CourseEnd, Instance};
use super::outcome::{DataflowOutcome, SimulatedWorkflow};
use super::requests::{Request, SimulatedObjectKey, SimulatedObjects};
use super::setup::{ArrivalProcess, DataflowSetup};
use super::stores::GpuStores;

/// The state of a run.
pub(super) struct DataflowRun<'a> {
    pub(super) setup: &'a DataflowSetup,
    pub(super) fabric: FluidFabric<CourseEnd>,
    pub(super) stores: GpuStores,
    pub(super) instances: Vec<Instance>,
    /// The indexes of the instances, by app, replica and function.
    pub(super) by_place: Vec<Vec<Vec<usize>>>,
    pub(super) requests: Vec<Request>,
    /// The number of requests that arrived, by app.
    pub(super) turns: Vec<usize>,
    pub(super) objects: SimulatedObjects,
    pub(super) last_key: SimulatedObjectKey,
    pub(super) records: Vec<SimulatedWorkflow>,
}

/// Runs a simulation until every request was answered and no transfer is left.
///
/// # Errors
/// Returns [`Error`] if the setup is invalid, a core refuses an event, or the simulation is stuck.
pub fn run(setup: &DataflowSetup) -> Result<DataflowOutcome, Error> {
    let mut sim = DataflowRun::new(setup)?;
    let mut arrivals = setup.open().into_iter().peekable();
    let total = match setup.arrivals {
        ArrivalProcess::Open(_) => arrivals.len(),
        ArrivalProcess::Closed { total, .. } => total,
    };
    let mut fullest: f64 = 0.0;
    while sim.records.len() < total || !sim.fabric.is_idle() {
        let wake = sim.stores.next_wake().filter(|_| sim.records.len() < total);
        let comes = arrivals.peek().map(|arrival| arrival.at);
        let next = sim.fabric.next()?.into_iter().chain(comes).chain(wake.map(|(at, _)| at)).min();
        let now = next.ok_or(Error::Stuck)?.max(sim.fabric.clock());
        sim.fabric.advance(now);
        if let Some((_, site)) = wake.filter(|(at, _)| *at <= now) {
            sim.tell(site, Event::Tick)?;
        }
        while let Some(arrival) = arrivals.next_if(|arrival| arrival.at <= now) {
            sim.arrive(arrival.function as usize);
        }
        let before = sim.records.len();
        loop {
            let ended = sim.fabric.collect()?;
            if ended.is_empty() {
                break;
            }
            for tag in ended {
                sim.ended(tag)?;
            }
        }
        if setup.is_audited {
            fullest = fullest.max(sim.fabric.fullest());
        }
        if matches!(setup.arrivals, ArrivalProcess::Closed { .. }) {
            for _ in before..sim.records.len() {
                if sim.requests.len() < total {
                    sim.arrive(0);
                }
            }
        }
    }
    sim.outcome(fullest)
}

impl<'a> DataflowRun<'a> {
    fn new(setup: &'a DataflowSetup) -> Result<Self, Error> {
        let sites = setup.sites()?;
        let mut instances = Vec::new();
        let mut by_place = Vec::new();
        for (app, replicas) in sites.iter().enumerate() {
            let mut of_app = Vec::new();
            for sites in replicas {
                let mut of_replica = Vec::new();
                for (function, &site) in sites.iter().enumerate() {
                    of_replica.push(instances.len());
                    instances.push(Instance::new(app, function, site));
                }
                of_app.push(of_replica);
            }
            by_place.push(of_app);
        }
        let all: Vec<GpuSite> = instances.iter().map(|instance: &Instance| instance.site).collect();
        Ok(Self {
            setup,
            fabric: FluidFabric::new(&setup.topology, setup.nodes, setup.system, setup.costs)?,
            stores: GpuStores::new(setup, all.into_iter())?,
            instances,
            by_place,
            requests: Vec::new(),
            turns: vec![0; setup.apps.len()],
            objects: SimulatedObjects::new(),
            last_key: 0,
            records: Vec::new(),
        })
    }

    pub(super) fn now(&self) -> Timestamp {
        self.fabric.clock()
    }

    fn outcome(mut self, fullest: f64) -> Result<DataflowOutcome, Error> {
        let memory = self.stores.memory(self.fabric.clock());
        let calls = self.stores.calls();
        let counts = self.stores.counts();
        let is_clean = self.fabric.is_idle() && self.objects.is_empty() && self.stores.settle()?;
        Ok(DataflowOutcome {
            records: self.records,
            methods: self.fabric.methods,
            memory,
            calls,
            counts,
            sent: self.fabric.sent,
            delivered: self.fabric.delivered,
            fullest,
            is_clean,
        })
    }
}
