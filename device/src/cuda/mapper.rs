//! The thread that maps and unmaps regions, one after another. Copies go to the arena and need no
//! mapping, so that a region is mapped while its bytes arrive; only launches wait for the mapping.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::driver::Context;
use crate::error::Error;

/// Work of the mapping thread.
pub(super) type MappingJob = Box<dyn FnOnce() + Send>;

/// Sends work to the mapping thread. The thread ends with the last of its senders.
#[derive(Debug, Clone)]
pub(super) struct Mapper(Sender<MappingJob>);

impl Mapper {
    pub(super) fn start(context: &Context) -> Result<Self, Error> {
        let (jobs, queue) = channel();
        let context = context.clone();
        let thread = std::thread::Builder::new().name("mapping".to_owned());
        // Not joined, because the thread ends with the process or with its device.
        let spawned = thread.spawn(move || serve(&context, &queue));
        spawned.map_err(Error::io("start the mapping thread"))?;
        Ok(Self(jobs))
    }

    pub(super) fn queue(&self, job: MappingJob) -> Result<(), Error> {
        self.0.send(job).map_err(|_| Error::ContextLost("the mapping thread has ended".to_owned()))
    }
}

fn serve(context: &Context, jobs: &Receiver<MappingJob>) {
    if let Err(error) = context.enter() {
        eprintln!("millrace executor: the mapping thread cannot use the GPU: {error}");
        return;
    }
    while let Ok(job) = jobs.recv() {
        job();
    }
}
