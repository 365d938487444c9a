//! The links of a cluster: cut, slowed and mended by proxies, or by the ground where that can.

use anyhow::bail;

use super::ground::Site;
use super::{Cluster, Process};
use crate::proxy::{Mend, Party, Slowness, Way};

/// How processes reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// Directly. Where the ground can, it cuts them.
    Direct,
    /// Through proxies, which cut and delay.
    Proxied,
}

impl Cluster {
    /// Cuts every link between the two sides, as `way` says of the first.
    ///
    /// # Errors
    /// When the ground does not do it.
    pub fn cut(&self, one: &[Party], other: &[Party], way: Way) -> anyhow::Result<()> {
        self.network.cut(one, other, way);
        self.obey()
    }

    /// Makes every link between these parties slow, both ways.
    pub fn slow(&self, among: &[Party], slowness: Slowness) {
        self.network.slow(among, slowness);
    }

    /// Takes every cut and slowness back. Says what becomes of what waited.
    ///
    /// # Errors
    /// When the ground does not do it.
    pub fn mend(&self, how: Mend) -> anyhow::Result<&'static str> {
        self.network.mend(how);
        self.obey()?;
        Ok(match (self.links, how) {
            (Links::Direct, _) => "what was lost is sent again",
            (Links::Proxied, Mend::Resume) => "what waited goes on",
            (Links::Proxied, Mend::Reset) => "what waited is reset",
        })
    }

    /// Whether links can be made slow.
    #[must_use]
    pub fn slows(&self) -> bool {
        self.links == Links::Proxied
    }

    /// Takes the link of a process down: nobody reaches it, clients included.
    ///
    /// # Errors
    /// When it has none of its own.
    pub fn unplug(&self, process: &Process, role: &str) -> anyhow::Result<()> {
        self.timeline.fault(format!("took the link of {process}{role} down"));
        self.plugged(process, false)
    }

    /// Takes it up again.
    ///
    /// # Errors
    /// When it has none of its own.
    pub fn plug(&self, process: &Process) -> anyhow::Result<()> {
        self.timeline.did(format!("took the link of {process} up again"));
        self.plugged(process, true)
    }

    fn plugged(&self, process: &Process, up: bool) -> anyhow::Result<()> {
        match &self.site {
            Site::Namespaces(namespaces) => namespaces.plug(&process.service(), up),
            _ => bail!("{process} has no link of its own: it takes --ground namespaces"),
        }
    }

    /// Has the ground cut what is cut, where proxies do not.
    fn obey(&self) -> anyhow::Result<()> {
        let Site::Namespaces(namespaces) = &self.site else { return Ok(()) };
        if self.links == Links::Proxied {
            return Ok(());
        }
        let cuts = self.network.cuts();
        let named = cuts.iter().filter_map(|(from, to)| Some((name(from)?, name(to)?)));
        namespaces.obey(&named.collect::<Vec<_>>())
    }
}

/// A party as the ground knows it. Whoever is outside has no name there.
fn name(party: &Party) -> Option<String> {
    match party {
        Party::Controller(id) => Some(Process::Controller(*id).service()),
        Party::Worker(name) => Some(name.clone()),
        Party::Outside => None,
    }
}
