//! The readiness of programs: an installed program is ready once one of its processes has sent its
//! greeting, and until its processes fail to start.

use tokio::sync::watch;

use super::plan::Phase;
use crate::programs::health::{Health, Healths, Said};

/// Adjusts the phase of a function that is a program, by the health that its process pool reports.
pub(super) fn judge(phase: &mut Phase, said: Option<&Said>) {
    if *phase != Phase::Ready {
        return;
    }
    match said.map(|said| &said.health) {
        Some(Health::Up) => {}
        Some(Health::Failing(why)) => *phase = Phase::Failed(why.clone()),
        Some(Health::Starting) | None => {
            *phase = Phase::Preparing("the function's processes are starting".to_owned());
        }
    }
}

/// Waits until the health of a program changes. Never returns on a worker without programs.
pub(super) async fn changed(healths: &mut Option<watch::Receiver<Healths>>) {
    match healths {
        // The host tier holds `Programs`, and with it the sender, so the channel does not close here.
        Some(healths) => drop(healths.changed().await),
        None => std::future::pending().await,
    }
}
