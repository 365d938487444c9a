//! The news that the front door is being closed, for everyone who works behind it.

use tokio::sync::watch;

/// Tells whether the door is closing. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Closing(watch::Receiver<bool>);

impl Closing {
    /// The news and the one who spreads it; dropping the sender closes the door too.
    pub(crate) fn new() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    pub(crate) fn is_closing(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// Ends once the door is closing.
    pub(crate) async fn begun(mut self) {
        if self.0.wait_for(|&closing| closing).await.is_err() {
            tracing::debug!("the front door was dropped unclosed");
        }
    }
}
