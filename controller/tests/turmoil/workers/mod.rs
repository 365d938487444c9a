//! Stub workers: processes on separate machines that hold a stream to every controller, and send and
//! obey the messages of real workers. The real workers' core ([`millrace_nodes::checkpoint`]) decides
//! the contents and times of checkpoints. Stub workers have no GPUs, models or requests, and invent the
//! held data.
//!
//! Two machines claim the same name: only one machine has the name at a time.
//!
//! | module | task |
//! |---|---|
//! | [`process`] | the state and actions of one process |
//! | [`session`] | a process's stream to one controller |

mod process;
mod session;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use millrace_types::NodeName;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::group::Outside;
pub(crate) use process::Process;

/// Machines that run a worker.
pub(crate) const MACHINES: u64 = 4;
/// Names that the machines claim, fewer than machines.
const NAMES: u64 = 3;
/// The interval at which a process looks for due actions.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The time that a process stays up after the goodbye, so that the goodbye is delivered.
const GOODBYE: Duration = Duration::from_millis(400);

pub(crate) fn host(machine: u64) -> String {
    format!("w{machine}")
}

/// Returns the node name that a machine claims.
pub(crate) fn name(machine: u64) -> NodeName {
    NodeName::new(&format!("n{}", machine % NAMES)).unwrap()
}

/// A machine's worker, as started each time.
#[derive(Clone)]
pub(crate) struct Worker {
    pub(crate) machine: u64,
    pub(crate) seed: u64,
    pub(crate) starts: Rc<Cell<u64>>,
    pub(crate) outside: Rc<Outside>,
}

impl Worker {
    /// Runs a process until the goodbye.
    pub(crate) async fn run(self) -> turmoil::Result {
        let Self { machine, seed, starts, outside } = self;
        outside.formed().await;
        let start = starts.get();
        starts.set(start + 1);
        let mut rng = StdRng::seed_from_u64(seed ^ machine.rotate_left(40) ^ start.rotate_left(24));
        // Stagger the starts.
        sleep(Duration::from_millis(rng.random_range(0..300))).await;
        let instance = format!("{}-{start}", host(machine));
        let process = Rc::new(Process::new(machine, instance, rng.random(), Rc::clone(&outside)));
        outside.processes.borrow_mut().insert(machine, Rc::clone(&process));
        let mut sessions = JoinSet::new();
        for controller in outside.members() {
            sessions.spawn_local(session::run(Rc::clone(&process), controller, rng.random()));
        }
        while !outside.leaves(machine) {
            process.until_awake().await;
            process.look();
            sleep(LOOK_EVERY).await;
        }
        process.say_goodbye();
        sleep(GOODBYE).await;
        outside.processes.borrow_mut().remove(&machine);
        Ok(())
    }
}
