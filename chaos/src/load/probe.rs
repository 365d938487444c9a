//! The probe makes a sequence of small writes, each with a short timeout, to show when writes
//! are accepted. The oracle does not judge these writes, because a write that timed out may take
//! effect at any time.

use std::sync::Arc;
use std::time::Duration;

use millrace_client::{Admin, ApplyOptions};
use millrace_types::Digest;

use super::availability::CallAvailability;
use super::client::Client;
use super::keys;

/// Timeout of a write, longer than a sound cluster takes under load. After a timeout the next write
/// gets twice as long, at most 8 times this value.
const PATIENCE: Duration = Duration::from_millis(400);
/// Pause between two writes, in milliseconds.
const THINK_MS: std::ops::Range<u64> = 20..40;

/// The name of the function that the probe writes.
pub(super) const NAME: &str = "probe";

pub(super) async fn run(mut client: Client, model: Digest, writes: Arc<CallAvailability>) {
    let admin = Admin::new(client.endpoints.clone());
    let mut value = 0;
    let mut patience = PATIENCE;
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
            // On some machines every write takes this long.
            Err(_) => patience = (patience * 2).min(PATIENCE * 8),
        }
    }
}
