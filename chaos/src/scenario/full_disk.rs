//! The scenario with a full disk of a controller. First the controller is killed and restarted, so that its
//! folder is on a small disk. The log continues in its reserved space, and no
//! write is lost. When the controller is killed then, its restart may be refused, with the reason;
//! the others continue. With free space, the controller is restarted over the same folder and
//! catches up.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::process::ExitStatus;

use anyhow::{Context as _, ensure};

use super::small_disk::SmallDisk;
use super::stage::ScenarioStage;
use crate::cluster::{ClusterProcess, PATIENCE, StartResult};

/// The system's message for a full disk.
const NO_SPACE: &str = "No space left on device";

pub(super) async fn play(stage: &mut ScenarioStage) -> anyhow::Result<()> {
    // The disks stay until the end of the run, because a restarted controller uses its disk again.
    let mut disks = BTreeMap::new();
    for round in 0..stage.rounds {
        let leads = round % 2 == 0;
        let id = if leads { stage.cluster.leader().await? } else { stage.a_follower().await? };
        let disk = match disks.entry(id) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(none) => none.insert(stage.on_a_small_disk(id).await?),
        };
        if leads {
            stage.lets_lead(id).await?;
        }
        stage.disk_is_full(id, leads, disk).await?;
    }
    Ok(())
}

impl ScenarioStage {
    /// Moves the folder of a controller to a separate small disk.
    async fn on_a_small_disk(&mut self, id: u64) -> anyhow::Result<SmallDisk> {
        self.cluster.kill(&ClusterProcess::Controller(id), ", to put its folder on a small disk").await?;
        let disk = SmallDisk::in_place_of(self.cluster.dir(id)?).await?;
        self.cluster.place_controller(id, disk.prefix())?;
        self.cluster.restart_controller(id).await?;
        self.whole().await?;
        Ok(disk)
    }

    /// Transfers the leadership to a controller, unless it leads already.
    async fn lets_lead(&mut self, id: u64) -> anyhow::Result<()> {
        let begun = self.timeline.now();
        // A slow sync at a voter may prevent the election in time, so the transfer is repeated.
        while self.cluster.leader().await? != id {
            if let Err(error) = self.cluster.admin()?.transfer_leadership(Some(id)).await {
                ensure!(self.timeline.now() - begun < PATIENCE, "controller {id} does not lead: {error}");
                self.timeline.saw(format!("controller {id} does not lead yet: {error}"));
            }
        }
        self.timeline.did(format!("controller {id} leads"));
        self.calm().await;
        Ok(())
    }

    async fn disk_is_full(&mut self, id: u64, leads: bool, disk: &SmallDisk) -> anyhow::Result<()> {
        let ids = self.cluster.controller_ids();
        let others: Vec<u64> = ids.into_iter().filter(|&other| other != id).collect();
        let taken = disk.fill()?;
        let role = if leads { "the leader" } else { "a follower" };
        self.timeline.fault(format!("filled the disk of controller {id}, {role}, with {taken} bytes"));
        self.fault();
        self.resumed().await?;
        self.calm().await;
        let ended = self.cluster.ended(&ClusterProcess::Controller(id));
        ensure!(ended.is_none(), "controller {id} ended on a full disk: {ended:?}");
        self.timeline.saw(format!("controller {id} still runs with a full disk"));

        self.cluster.kill(&ClusterProcess::Controller(id), ", with a full disk").await?;
        self.fault();
        let (leader, term) = self.cluster.leader_among(&others, None).await?;
        self.timeline.saw(format!("controller {leader} leads, term {term}"));
        self.resumed().await?;
        self.note_writes_resumed();

        let before = self.cluster.log(id)?.len();
        let start = self.cluster.try_restart_controller(id).await?;
        match &start {
            StartResult::Refused(status, _) => {
                self.timeline.saw(format!("controller {id} does not start on a full disk"));
                self.names_the_disk(id, *status, before)?;
            }
            StartResult::Serves => {
                self.timeline.saw(format!("controller {id} starts in the space reserved for its log"));
            }
        }
        self.calm().await;
        disk.free()?;
        self.timeline.did(format!("freed the disk of controller {id}"));
        if let StartResult::Refused(..) = start {
            self.cluster.restart_controller(id).await?;
        }
        self.resumed().await?;
        self.whole().await?;
        self.calm().await;
        Ok(())
    }

    /// Checks that the controller's log since `before` names the disk and the fault.
    fn names_the_disk(&self, id: u64, status: ExitStatus, before: usize) -> anyhow::Result<()> {
        let log = self.cluster.log(id)?;
        let said = log.get(before..).unwrap_or_default();
        let error = said.lines().find(|line| line.starts_with("error:"));
        let error = error
            .with_context(|| format!("controller {id} ends ({status}) without an error message: {said}"))?;
        self.timeline.saw(format!("controller {id} reports: {error}"));
        ensure!(status.code() == Some(1), "controller {id} ends with {status}");
        ensure!(error.contains(NO_SPACE), "the error does not report a full disk: {error}");
        let dir = self.cluster.dir(id)?.display().to_string();
        ensure!(error.contains(&dir), "the error does not name the full disk: {error}");
        Ok(())
    }
}
