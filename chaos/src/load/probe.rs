//! One small write after the other, each given up soon: it only tells when writes are taken. What it
//! writes is not judged, as a write that was given up may come into force at any time.

use std::sync::Arc;
use std::time::Duration;

use millrace_client::{Admin, ApplyOptions};
use millrace_types::Digest;

use super::{Availability, Client, keys};

/// How long a write is waited for: longer than a sound cluster takes under load. After one that took
/// longer twice as long, 8 times at most.
const PATIENCE: Duration = Duration::from_millis(400);
/// The pause between two, in milliseconds.
const THINK_MS: std::ops::Range<u64> = 20..40;

/// What the probe writes.
pub(super) const NAME: &str = "probe";

pub(super) async fn run(mut client: Client, model: Digest, writes: Arc<Availability>) {
    let admin = Admin::new(client.endpoints.clone());
    let (mut value, mut patience) = (0, PATIENCE);
    while client.think(THINK_MS).await {
        value += 1;
        let invoked = client.timeline.now();
        let spec = keys::spec(NAME, value);
        let write = admin.apply(&spec, model, ApplyOptions::default());
        match tokio::time::timeout(patience, write).await {
            Ok(Ok(_)) => {
                writes.worked(invoked);
                patience = PATIENCE;
            }
            Ok(Err(_)) => {}
            // There are machines on which every write takes so long.
            Err(_) => patience = (patience * 2).min(PATIENCE * 8),
        }
    }
}
