//! Copies of large data on threads of their own: on the actors' they would hold up every request of the
//! worker. So many at one time, and further ones wait for their turn. Whoever asks for one waits for it before
//! it hears more of its process, so that what a process asks is answered in its order.

use std::io;
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

/// Copies at one time. They take memory's bandwidth from the requests, and more would not be done sooner.
pub(super) const COPIES_MAX: usize = 4;

/// Where copies are made. Clones are the same.
#[derive(Debug, Clone)]
pub(super) struct Aside(Arc<Semaphore>);

impl Default for Aside {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(COPIES_MAX)))
    }
}

impl Aside {
    /// Makes a copy. One that was begun is made to its end, whether or not it is waited for.
    ///
    /// # Errors
    /// The copy's; and that the worker stops.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        copy: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let turn = Arc::clone(&self.0).acquire_owned().await.map_err(io::Error::other)?;
        let made = spawn_blocking(move || {
            let made = copy();
            drop(turn);
            made
        });
        made.await.map_err(io::Error::other)?
    }
}

#[cfg(test)]
impl Aside {
    /// Lets no other copy be made until this is dropped.
    pub(super) async fn take_all(&self) -> tokio::sync::OwnedSemaphorePermit {
        Arc::clone(&self.0).acquire_many_owned(COPIES_MAX as u32).await.unwrap()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};

    use futures::FutureExt as _;
    use futures::future::join_all;

    use super::*;

    #[tokio::test]
    async fn only_so_many_copies_are_made_at_one_time_and_none_of_them_here() {
        let aside = Aside::default();
        let (begin, begun) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let ended = Arc::new(Mutex::new(ended));
        let copy = |number: usize| {
            let (begin, ended) = (begin.clone(), Arc::clone(&ended));
            aside.run(move || {
                begin.send(number).unwrap();
                // Until the test lets all of them go on.
                ended.lock().unwrap().recv().unwrap_or_default();
                Ok(number)
            })
        };
        let mut copies = Box::pin(join_all((0..COPIES_MAX + 3).map(copy)));
        // This thread comes back, though no copy is made.
        assert!(copies.as_mut().now_or_never().is_none());
        let mut first: Vec<usize> = begun.iter().take(COPIES_MAX).collect();
        first.sort_unstable();
        assert!(first.into_iter().eq(0..COPIES_MAX) && begun.try_recv().is_err());
        drop(end);
        let made: io::Result<Vec<usize>> = copies.await.into_iter().collect();
        assert!(made.unwrap().into_iter().eq(0..COPIES_MAX + 3));
    }
}
