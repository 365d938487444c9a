//! Tests of the store of a simulated machine, which is the real store in simulated time.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use super::tally::{RecordingMachine, all, append, entries, identity};
use crate::sim::{self, SimDisk};
use crate::{DataDir, RaftStore};

/// The unit that [`sim::torn`] keeps or loses as a whole, in bytes.
const SECTOR: usize = 512;

struct Slow(Duration);

impl SimDisk for Slow {
    fn write_time(&mut self) -> Duration {
        self.0
    }

    fn sync(&mut self, _: &Path) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_takes_simulated_time_and_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let open = || -> RaftStore<RecordingMachine> {
        let disk = Box::new(Slow(Duration::from_millis(7)));
        sim::open(DataDir::open(dir.path()).unwrap(), &identity(), disk).unwrap()
    };
    let mut store = open();
    let before = Instant::now();
    append(&mut store.log, entries(0, 3)).await;
    assert_eq!(before.elapsed(), Duration::from_millis(7));
    drop(store);
    assert_eq!(all(&mut open().log).await, entries(0, 3));
}

#[test]
fn a_power_cut_keeps_or_loses_whole_sectors() {
    let old = [1; 2 * SECTOR];
    let new = [2; 3 * SECTOR];
    let mut kept = [true, false, false].into_iter();
    let image = sim::torn(&old, &new, 2 * SECTOR + 1, || kept.next().unwrap());
    assert_eq!(image, [vec![2; SECTOR], vec![1; SECTOR], vec![0]].concat());
}
