//! The links of a cluster: cut, slowed and restored by proxies, or by a ground that can.

use anyhow::bail;

use super::cluster_process::ClusterProcess;
use super::ground::RunningGround;
use super::plan::LinkMode;
use super::test_cluster::TestCluster;
use crate::proxy::{CutDirection, LinkParty, LinkSlowness, RestoreMode};

impl TestCluster {
    /// Cuts every link between the two sides; `way` is the direction as seen from `one`.
    ///
    /// # Errors
    /// If the ground cannot cut the links.
    pub fn cut(&self, one: &[LinkParty], other: &[LinkParty], way: CutDirection) -> anyhow::Result<()> {
        self.network.cut(one, other, way);
        self.obey()
    }

    /// Slows every link between these parties, in both directions.
    pub fn slow(&self, among: &[LinkParty], slowness: LinkSlowness) {
        self.network.slow(among, slowness);
    }

    /// Removes every cut and delay. Returns the fate of the data that waited, for the timeline.
    ///
    /// # Errors
    /// If the ground cannot restore the links.
    pub fn mend(&self, how: RestoreMode) -> anyhow::Result<&'static str> {
        self.network.mend(how);
        self.obey()?;
        Ok(match (self.links, how) {
            (LinkMode::Direct, _) => "TCP sends lost packets again",
            (LinkMode::Proxied, RestoreMode::Resume) => "waiting data is delivered",
            (LinkMode::Proxied, RestoreMode::Reset) => "waiting connections are reset",
        })
    }

    /// Whether links can be slowed.
    #[must_use]
    pub fn slows(&self) -> bool {
        self.links == LinkMode::Proxied
    }

    /// Takes the link of a process down, so that neither clients nor other processes reach it.
    ///
    /// # Errors
    /// If the process has no link of its own.
    pub fn unplug(&self, process: &ClusterProcess, role: &str) -> anyhow::Result<()> {
        self.timeline.fault(format!("took down the link of {process}{role}"));
        self.plugged(process, false)
    }

    /// Takes the link of a process up again.
    ///
    /// # Errors
    /// If the process has no link of its own.
    pub fn plug(&self, process: &ClusterProcess) -> anyhow::Result<()> {
        self.timeline.did(format!("took up the link of {process} again"));
        self.plugged(process, true)
    }

    fn plugged(&self, process: &ClusterProcess, up: bool) -> anyhow::Result<()> {
        match &self.ground {
            RunningGround::Namespaces(namespaces) => namespaces.plug(&process.service(), up),
            _ => bail!("{process} has no link of its own: use --ground namespaces"),
        }
    }

    /// Applies the cuts through the ground, unless proxies do.
    fn obey(&self) -> anyhow::Result<()> {
        let RunningGround::Namespaces(namespaces) = &self.ground else { return Ok(()) };
        if self.links == LinkMode::Proxied {
            return Ok(());
        }
        let cuts = self.network.cuts();
        let named = cuts.iter().filter_map(|(from, to)| Some((name(from)?, name(to)?)));
        namespaces.apply_cuts(&named.collect::<Vec<_>>())
    }
}

/// Returns the name of a party on the ground; a client outside the cluster has none.
fn name(party: &LinkParty) -> Option<String> {
    match party {
        LinkParty::Controller(id) => Some(ClusterProcess::Controller(*id).service()),
        LinkParty::Worker(name) => Some(name.clone()),
        LinkParty::Outside => None,
    }
}
