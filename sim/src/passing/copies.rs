//! The steps of copies in a system, and the costs that a copy pays before it begins.

use std::time::Duration;

use millrace_memory::elastic::Event;
use millrace_transfers::paths::{HostDirection, HostLinks};
use millrace_transfers::rates::TransferObjective;
use millrace_types::{Bytes, BytesPerSec};

use super::error::Error;
use super::fabric::{GpuSite, TransferStep};
use super::instances::CourseEnd;
use super::requests::{SimulatedObject, SimulatedObjectKey};
use super::run::DataflowRun;
use super::stores::RequestedCopy;
use super::system::{Oriented, Pinning};

impl DataflowRun<'_> {
    fn call_cost(&self) -> Duration {
        let costs = &self.setup.costs;
        if self.setup.system.piped { costs.piped_call } else { costs.remote_call }
    }

    pub(super) fn is_host_oriented(&self) -> bool {
        self.setup.system.oriented == Oriented::Host
    }

    /// Returns the time of pinning memory for a copy over this number of links.
    fn pinning(&self, bytes: Bytes, links: u32) -> Duration {
        let parts = match self.setup.system.pinning {
            Pinning::Ring => return Duration::ZERO,
            Pinning::ByLink => links,
            Pinning::Whole => 1,
        };
        Duration::from_nanos((bytes.0 as f64 * self.setup.costs.pin_ns / f64::from(parts)) as u64)
    }

    /// Returns the objective of a copy for a function: 1.5 times the time that copy and computation take
    /// alone (D18).
    fn objective(&self, bytes: Bytes, rate: BytesPerSec, compute: Duration) -> Option<TransferObjective> {
        let alone = rate.time_for(bytes) + compute;
        Some(TransferObjective { slo: alone + alone / 2, infer: compute })
    }

    /// Returns the steps of a copy between a GPU and its host, for a function of this computing time. Also
    /// returns the time that the copy pays first.
    pub(super) fn host_steps(
        &self,
        site: GpuSite,
        direction: HostDirection,
        bytes: Bytes,
        compute: Duration,
    ) -> (Duration, [TransferStep; 2]) {
        let node = &self.fabric.nodes[site.node];
        let links = self.setup.system.host_links;
        let reach = node.reach(site.gpu, links);
        let first = self.call_cost() + self.pinning(bytes, reach);
        let rate = BytesPerSec(node.rate_of(node.pcie(site.gpu)).0 * u64::from(reach));
        let objective = self.objective(bytes, rate, compute);
        (first, [TransferStep::Wait(first), TransferStep::Host { site, direction, bytes, links, objective }])
    }

    /// Returns the steps that copy an input to a GPU (D04).
    pub(super) fn fetch_steps(
        &self,
        to: GpuSite,
        key: SimulatedObjectKey,
        compute: Duration,
    ) -> Vec<TransferStep> {
        let Some(&SimulatedObject { site: from, size: bytes, .. }) = self.objects.get(&key) else {
            return Vec::new();
        };
        let (_, load) = self.host_steps(to, HostDirection::ToGpu, bytes, compute);
        let network = TransferStep::Network { from: from.node, to: to.node, bytes };
        let on_host = self.is_host_oriented() || self.stores.is_on_host(from, key);
        if on_host {
            return if from.node == to.node { load.to_vec() } else { vec![network, load[0], load[1]] };
        }
        let mut first = self.call_cost();
        if from.node != to.node {
            // Both hosts pin their memory at the same time, so pinning counts once.
            let reach = self.fabric.nodes[to.node].reach(to.gpu, self.setup.system.host_links);
            first += self.pinning(bytes, reach);
        }
        let pcie = &self.fabric.nodes[to.node];
        let objective = self.objective(bytes, pcie.rate_of(pcie.pcie(to.gpu)), compute);
        vec![TransferStep::Wait(first), TransferStep::Gpus { from, to, bytes, objective }]
    }

    /// Sends an event to a store, and begins the copies that the store requests.
    pub(super) fn tell(&mut self, site: GpuSite, event: Event) -> Result<(), Error> {
        let told = self.stores.handle_event(self.now(), site, event)?;
        self.want(site, &told.wanted, told.wait);
        Ok(())
    }

    pub(super) fn want(&mut self, site: GpuSite, wanted: &[RequestedCopy], wait: Duration) {
        for &it in wanted {
            let (RequestedCopy::Place(key)
            | RequestedCopy::Migrate(key)
            | RequestedCopy::Reload(key)
            | RequestedCopy::Refuse(key)) = it;
            let Some(bytes) = self.objects.get(&key).map(|object| object.size) else {
                debug_assert!(false, "a store moved an object that all consumers have read");
                continue;
            };
            let copy = |direction| {
                [TransferStep::Host { site, direction, bytes, links: HostLinks::Own, objective: None }]
            };
            match it {
                RequestedCopy::Place(_) => {
                    let first = self.call_cost() + wait + self.setup.costs.within_gpu.time_for(bytes);
                    self.fabric.begin(CourseEnd::Stored(key), [TransferStep::Wait(first)]);
                }
                RequestedCopy::Migrate(_) => {
                    self.fabric.begin(CourseEnd::Migrated(site, key), copy(HostDirection::FromGpu));
                }
                RequestedCopy::Reload(_) => {
                    self.fabric.begin(CourseEnd::Reloaded(site, key), copy(HostDirection::ToGpu))
                }
                RequestedCopy::Refuse(_) => {
                    self.fabric.begin(CourseEnd::Refused(site, key), copy(HostDirection::FromGpu))
                }
            }
        }
    }
}
