//! openraft's own storage suite.

use openraft::testing::{StoreBuilder, Suite};
use tempfile::TempDir;

use super::tally::{RecordingMachine, everything_covered};
use crate::fs::DiskFs;
use crate::log::{ExpectedLog, LogStore};
use crate::{StateMachineStore, StorageError, TypeConfig};

struct Fresh;

impl
    StoreBuilder<
        TypeConfig<RecordingMachine>,
        LogStore<RecordingMachine>,
        StateMachineStore<RecordingMachine>,
        TempDir,
    > for Fresh
{
    async fn build(
        &self,
    ) -> Result<(TempDir, LogStore<RecordingMachine>, StateMachineStore<RecordingMachine>), StorageError>
    {
        let dir = tempfile::tempdir().unwrap();
        let machine =
            StateMachineStore::open(std::sync::Arc::new(DiskFs::default()), dir.path().join("snapshots"))
                .unwrap();
        // The suite purges entries that no snapshot covers, which openraft never does.
        let log = LogStore::open(dir.path(), ExpectedLog::Nothing, everything_covered()).unwrap();
        Ok((dir, log, machine))
    }
}

#[test]
fn the_store_passes_openrafts_storage_suite() {
    Suite::test_all(Fresh).unwrap();
}
