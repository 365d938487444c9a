//! openraft's own storage suite.

use openraft::testing::{StoreBuilder, Suite};
use tempfile::TempDir;

use super::tally::{Tally, everything_covered};
use crate::fs::Disk;
use crate::log::{Expect, LogStore};
use crate::{MachineStore, StorageError, TypeConfig};

struct Fresh;

impl StoreBuilder<TypeConfig<Tally>, LogStore<Tally>, MachineStore<Tally>, TempDir> for Fresh {
    async fn build(&self) -> Result<(TempDir, LogStore<Tally>, MachineStore<Tally>), StorageError> {
        let dir = tempfile::tempdir().unwrap();
        let machine =
            MachineStore::open(std::sync::Arc::new(Disk::default()), dir.path().join("snapshots")).unwrap();
        // The suite purges entries that no snapshot covers, which openraft never does.
        let log = LogStore::open(dir.path(), Expect::Nothing, everything_covered()).unwrap();
        Ok((dir, log, machine))
    }
}

#[test]
fn the_store_passes_openrafts_storage_suite() {
    Suite::test_all(Fresh).unwrap();
}
