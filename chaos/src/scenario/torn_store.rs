//! The scenario in which a controller dies and the disk damages the files. The restarted controller
//! either serves without any loss, or refuses to start and names the damage. In the latter case,
//! the controller is replaced as in docs/operate/controllers.md. Only a single controller at a time is damaged, so
//! that the others have all data.

use std::process::ExitStatus;

use anyhow::{Context as _, ensure};
use rand::Rng as _;
use rand::seq::SliceRandom as _;

use super::damage::StoreDamage;
use super::stage::ScenarioStage;
use crate::cluster::{ClusterProcess, StartResult, until};

/// The phrases with which a refusal names the damage.
const REFUSALS: [&str; 2] = ["is damaged", "is missing although"];
/// The advice in every refusal: to bring the controller back under a new id.
const ADVICE: &str = "with a new id";

pub(super) async fn play(stage: &mut ScenarioStage) -> anyhow::Result<()> {
    let mut damages = StoreDamage::ALL;
    damages.shuffle(&mut stage.rng);
    for damage in damages.into_iter().cycle().take(stage.rounds as usize) {
        let leader = stage.cluster.leader().await?;
        let (victim, role) = match stage.rng.random() {
            true => (leader, ", which led"),
            false => (stage.a_follower().await?, ", which followed"),
        };
        stage.snapshots_are_kept(victim).await?;
        stage.fault();
        stage.cluster.kill(&ClusterProcess::Controller(victim), role).await?;
        let done = damage.inflict(stage.cluster.dir(victim)?, &mut stage.rng)?;
        stage.timeline.fault(format!("{done}, of controller {victim}"));
        stage.resumed().await?;
        stage.note_writes_resumed();
        stage.calm().await;
        let before = stage.cluster.log(victim)?.len();
        match stage.cluster.try_restart_controller(victim).await? {
            StartResult::Serves => stage.serves_or_ends(victim, before).await?,
            StartResult::Refused(status, said) => {
                stage.refused(victim, status, &said)?;
                stage.replace(victim).await?;
            }
        }
        stage.resumed().await?;
        stage.whole().await?;
        stage.calm().await;
    }
    Ok(())
}

impl ScenarioStage {
    /// Waits until a controller has a snapshot, which the load causes.
    async fn snapshots_are_kept(&self, id: u64) -> anyhow::Result<()> {
        let dir = self.cluster.dir(id)?.join("snapshots");
        until(&format!("controller {id} has a snapshot"), async || {
            let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten();
            let mut names = entries.map(|entry| entry.file_name());
            let found = names.any(|name| name.to_string_lossy().ends_with(".snapshot"));
            (!found).then(|| "there is no snapshot".to_owned())
        })
        .await
    }

    /// Waits until a controller over a damaged folder is whole again. Damage that is found only
    /// when the data is read ends the controller, with the same message as at its start. The
    /// controller's log since `before` is from this start.
    async fn serves_or_ends(&mut self, id: u64, before: usize) -> anyhow::Result<()> {
        match self.whole_unless_ended(id).await? {
            None => self.timeline.saw(format!("controller {id} serves, with nothing lost")),
            Some(status) => {
                let log = self.cluster.log(id)?;
                self.refused(id, status, log.get(before..).unwrap_or_default())?;
                self.replace(id).await?;
            }
        }
        Ok(())
    }

    /// Checks that a refusal is the program's own, and names the fault and the next step.
    fn refused(&self, id: u64, status: ExitStatus, said: &str) -> anyhow::Result<()> {
        let error = said.lines().find(|line| line.starts_with("error:"));
        let error = error
            .with_context(|| format!("controller {id} ends ({status}) without an error message: {said}"))?;
        self.timeline.saw(format!("controller {id} refuses: {error}"));
        ensure!(status.code() == Some(1), "controller {id} refuses and ends with {status}");
        ensure!(
            REFUSALS.iter().any(|it| error.contains(it)),
            "the refusal does not name the damage: {error}"
        );
        ensure!(error.contains(ADVICE), "the refusal does not name the next step: {error}");
        Ok(())
    }

    /// Removes a controller with a damaged disk, and starts another in its place.
    async fn replace(&mut self, id: u64) -> anyhow::Result<()> {
        let ids = self.cluster.controller_ids();
        let new = ids.iter().max().copied().unwrap_or_default() + 1;
        let others: Vec<u64> = ids.into_iter().filter(|&other| other != id).collect();
        let admin = self.cluster.admin_of_all(&others)?;
        // The group refuses the removal while another controller does not answer at once, as may
        // happen on a busy machine.
        until(&format!("controller {id} is removed"), async || {
            if let Ok(status) = admin.cluster_status().await
                && status.controllers.iter().all(|it| it.id != id)
            {
                return None;
            }
            Some(admin.remove_controller(id).await.map_or_else(|error| error.to_string(), |_| "asked".into()))
        })
        .await?;
        self.timeline.did(format!("removed controller {id} from the group"));
        self.cluster.add_controller(new, Some(id)).await?;
        self.timeline.did(format!("started controller {new} in its place, with an empty folder"));
        Ok(())
    }
}
