//! The notification that the gateway is closing, for all parts of the gateway.

use tokio::sync::watch;

/// Tells whether the gateway is closing. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct ShutdownSignal(watch::Receiver<bool>);

impl ShutdownSignal {
    /// Creates the sender and a receiver. Dropping the sender also closes the gateway.
    pub(crate) fn new() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    pub(crate) fn is_closing(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// Waits until the gateway is closing.
    pub(crate) async fn wait(mut self) {
        if self.0.wait_for(|&closing| closing).await.is_err() {
            tracing::debug!("the gateway was dropped without closing");
        }
    }
}
