//! The session of a process with the worker: opens the socket, and serves one call after another.

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use crate::call::Call;
use crate::error::Error;
use crate::link::SessionState;

/// The connection of a process to its worker.
#[derive(Debug)]
pub struct Session(Arc<SessionState>);

impl Session {
    /// Greets the worker that started this process, over the socket at standard input. Replaces
    /// standard input with an empty file, so that a child of this process cannot read the worker's
    /// messages.
    ///
    /// # Errors
    /// [`Error::Socket`] when no worker started the process, [`Error::Version`] when the worker is
    /// of another version.
    pub fn open() -> Result<Self, Error> {
        let socket = io::stdin().as_fd().try_clone_to_owned().map_err(Error::Socket)?;
        let nothing = File::open("/dev/null").map_err(Error::Socket)?;
        rustix::stdio::dup2_stdin(&nothing).map_err(|error| Error::Socket(error.into()))?;
        Self::over(socket)
    }

    /// Greets a worker over another socket than standard input.
    ///
    /// # Errors
    /// The errors of [`Self::open`].
    pub fn over(socket: OwnedFd) -> Result<Self, Error> {
        Ok(Self(Arc::new(SessionState::greet(socket)?)))
    }

    /// Waits for the next call. Returns `None` when the worker needs this process no longer. The
    /// previous call must be answered first.
    ///
    /// # Errors
    /// [`Error::CallUnanswered`] while the previous call is not answered. [`Error::Socket`] and
    /// [`Error::Protocol`], after which the process should exit.
    pub fn next_call(&self) -> Result<Option<Call>, Error> {
        let Some((call, arrived)) = self.0.receive_call()? else { return Ok(None) };
        Call::new(Arc::clone(&self.0), call, arrived).map(Some)
    }
}

/// Serves calls until the worker needs the process no longer. The main function of a program calls
/// this function. An error of `function` fails the request. A panic ends the process, and the
/// worker starts another.
///
/// # Errors
/// The errors of [`Session::open`] and [`Session::next_call`].
pub fn serve<E: Display>(mut function: impl FnMut(&Call) -> Result<(), E>) -> Result<(), Error> {
    let session = Session::open()?;
    while let Some(call) = session.next_call()? {
        match function(&call) {
            Ok(()) => call.finish()?,
            Err(error) => call.fail(&error.to_string())?,
        }
    }
    Ok(())
}
