//! File operations on blocking threads.

use millrace_types::{Failure, Reason};

use millrace_storage::Error;

/// Runs a file operation on a blocking thread.
pub(super) async fn blocking<T, F>(work: F) -> Result<T, Failure>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, Error> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(Failure::from),
        Err(error) => {
            Err(Failure::new(Reason::Internal, format!("a file operation did not finish: {error}")))
        }
    }
}
