//! The readiness of programs: an installed program is ready once one of its processes has sent its
//! greeting, and until its processes fail to start.

use tokio::sync::watch;

use super::plan::ServingPhase;
use crate::programs::health::{HealthReport, ProcessHealth, ProgramHealths};

/// Adjusts the phase of a function that is a program, by the health that its process pool reports.
pub(super) fn judge(phase: &mut ServingPhase, said: Option<&HealthReport>) {
    if *phase != ServingPhase::Ready {
        return;
    }
    match said.map(|said| &said.health) {
        Some(ProcessHealth::Up) => {}
        Some(ProcessHealth::Failing(why)) => *phase = ServingPhase::Failed(why.clone()),
        Some(ProcessHealth::Starting) | None => {
            *phase = ServingPhase::Preparing("the function's processes are starting".to_owned());
        }
    }
}

/// Waits until the health of a program changes. Never returns on a worker without programs.
pub(super) async fn changed(healths: &mut Option<watch::Receiver<ProgramHealths>>) {
    match healths {
        // The host tier holds the `ProgramStore`, and with it the sender, so the channel does not close here.
        Some(healths) => drop(healths.changed().await),
        None => std::future::pending().await,
    }
}
