//! The disk of one simulated controller: how long its writes take, and what is on it after a power
//! cut.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use millrace_raft_store::sim::{SimDisk, torn};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// What a write and its sync take, in microseconds, when nothing is the matter.
const WRITE_US: std::ops::Range<u64> = 200..3_000;
/// One write in so many stalls.
const STALLS_ONE_IN: u32 = 150;
/// For how long, in milliseconds: up to beyond a leader's lease.
const STALL_MS: std::ops::Range<u64> = 20..600;

/// A disk. Clones share it; it outlives the process that writes to it.
#[derive(Debug, Clone)]
pub(crate) struct Disk(Arc<Mutex<Platter>>);

#[derive(Debug)]
struct Platter {
    rng: StdRng,
    power: Power,
}

#[derive(Debug)]
enum Power {
    On,
    /// Goes off at a sync soon: first what is durable is noted.
    Failing,
    /// Goes off at the next sync, before which sled's file was this.
    LastSync(Vec<u8>),
    /// Off. sled's file is this once it is back.
    Off(Vec<u8>),
}

impl Disk {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(Platter { rng: StdRng::seed_from_u64(seed), power: Power::On })))
    }

    fn platter(&self) -> MutexGuard<'_, Platter> {
        self.0.lock().unwrap()
    }

    /// Lets the power go off within the second sync from now.
    pub(crate) fn cut_soon(&self) {
        self.platter().power = Power::Failing;
    }

    /// Whether the power is off: what runs on it is to be stopped.
    pub(crate) fn is_off(&self) -> bool {
        matches!(self.platter().power, Power::Off(_))
    }

    /// The power is back: sled's file is as the cut left it.
    pub(crate) fn restore(&self, db: &Path) -> io::Result<()> {
        match std::mem::replace(&mut self.platter().power, Power::On) {
            Power::Off(image) => fs::write(db, image),
            Power::On | Power::Failing | Power::LastSync(_) => Ok(()),
        }
    }
}

impl SimDisk for Disk {
    fn write_time(&mut self) -> Duration {
        let rng = &mut self.platter().rng;
        if rng.random_ratio(1, STALLS_ONE_IN) {
            return Duration::from_millis(rng.random_range(STALL_MS));
        }
        Duration::from_micros(rng.random_range(WRITE_US))
    }

    /// Nothing is really synced: the machine that runs the simulation does not lose its power.
    fn sync(&mut self, db: &Path) -> io::Result<()> {
        let Platter { rng, power } = &mut *self.platter();
        *power = match power {
            Power::On => return Ok(()),
            Power::Failing => {
                *power = Power::LastSync(fs::read(db)?);
                return Ok(());
            }
            Power::LastSync(synced) => {
                let written = fs::read(db)?;
                let len = rng.random_range(synced.len().min(written.len())..=synced.len().max(written.len()));
                let kept = rng.random::<f64>();
                Power::Off(torn(synced, &written, len, || rng.random_bool(kept)))
            }
            Power::Off(_) => return Err(io::Error::other("the power is off")),
        };
        Err(io::Error::other("the power is off"))
    }
}
