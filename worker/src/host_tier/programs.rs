//! Programs among what is served: one that is installed is ready once one of its processes has greeted,
//! and as long as it starts.

use tokio::sync::watch;

use super::plan::Phase;
use crate::programs::health::{Health, Healths, Said};

/// How far a function is that is a program, by what its Crew says.
pub(super) fn judge(phase: &mut Phase, said: Option<&Said>) {
    if *phase != Phase::Ready {
        return;
    }
    match said.map(|said| &said.health) {
        Some(Health::Up) => {}
        Some(Health::Failing(why)) => *phase = Phase::Failed(why.clone()),
        Some(Health::Starting) | None => *phase = Phase::Preparing("its processes start".to_owned()),
    }
}

/// Waits until something is said of programs; for ever where there are none.
pub(super) async fn changed(healths: &mut Option<watch::Receiver<Healths>>) {
    match healths {
        // The sender is held by whoever waits here.
        Some(healths) => drop(healths.changed().await),
        None => std::future::pending().await,
    }
}
