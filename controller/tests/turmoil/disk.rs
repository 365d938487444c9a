//! The disk of one simulated controller: the duration of writes, and the contents after a power cut.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use millrace_raft_store::sim::{SimDisk, torn};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// The duration of a normal write with a sync, in microseconds.
const WRITE_US: std::ops::Range<u64> = 200..3_000;
/// The inverse probability that a write stalls.
const STALLS_ONE_IN: u32 = 150;
/// The duration of a stall, in milliseconds: up to more than a leader's lease.
const STALL_MS: std::ops::Range<u64> = 20..600;

/// A disk. Clones share the disk, which outlives the writing process.
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
    /// The power fails soon: the next sync records the durable contents first.
    Failing,
    /// The power fails at the next sync. The value is sled's file as of the last sync.
    LastSync(Vec<u8>),
    /// The power is off. The value is sled's file after the power returns.
    Off(Vec<u8>),
}

impl Disk {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(Platter { rng: StdRng::seed_from_u64(seed), power: Power::On })))
    }

    fn platter(&self) -> MutexGuard<'_, Platter> {
        self.0.lock().unwrap()
    }

    /// Makes the power fail within the second sync from now.
    pub(crate) fn cut_soon(&self) {
        self.platter().power = Power::Failing;
    }

    /// Whether the power is off, so that the process on this machine must be stopped.
    pub(crate) fn is_off(&self) -> bool {
        matches!(self.platter().power, Power::Off(_))
    }

    /// Restores the power, with sled's file as left by the cut.
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

    /// Does not really sync, because the machine that runs the simulation keeps power.
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
