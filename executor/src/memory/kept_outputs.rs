//! Outputs that stay on the GPU after the run until the worker drops them. Objects are filled from
//! these outputs, and copies to the host read them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millrace_proto::executor::OutputPart;
use millrace_types::DataType;

/// Most runs with kept outputs at a time. A worker drops a run's outputs after it placed or copied
/// the ones that it needs, so more runs indicate a fault of the worker.
pub const RUNS_KEPT_MAX: usize = 256;

/// Most bytes of kept outputs. They are in the memory beside the models and objects: with CUDA in the
/// 4 GiB that the engine has, otherwise in [`MEMORY_BESIDE_GPU`](crate::MEMORY_BESIDE_GPU). A run sends
/// the outputs that would exceed the limit to the worker instead.
pub(crate) const KEPT_BYTES_MAX: u64 = 1 << 30;

/// A kept output.
#[derive(Debug)]
pub(crate) struct KeptOutput<V> {
    pub(crate) name: String,
    pub(crate) datatype: DataType,
    pub(crate) bytes: u64,
    pub(crate) value: V,
    /// The output's part of [`KEPT_BYTES_MAX`].
    pub(crate) _room: KeptRoom,
}

/// A part of [`KEPT_BYTES_MAX`], which is free again once the value is dropped.
#[derive(Debug)]
pub(crate) struct KeptRoom {
    bytes: u64,
    /// The bytes of all parts.
    total: Arc<AtomicU64>,
}

impl Drop for KeptRoom {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A byte range of a kept output.
#[derive(Debug)]
pub(crate) struct KeptOutputBytes<V> {
    pub(crate) output: Arc<KeptOutput<V>>,
    pub(crate) bytes: Range<u64>,
}

/// All kept outputs, by run. Runs add outputs, and commands use and drop them.
#[derive(Debug)]
pub(crate) struct KeptOutputs<V> {
    runs: Mutex<OutputsByRun<V>>,
    /// The bytes of all outputs that exist, also of those that were dropped while they are copied.
    bytes: Arc<AtomicU64>,
}

type OutputsByRun<V> = BTreeMap<u64, Vec<Arc<KeptOutput<V>>>>;

/// Reason why outputs cannot be kept, or cannot be found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("the outputs of {RUNS_KEPT_MAX} runs are kept: drop some first")]
    TooMany,
    #[error("outputs of run {0} are kept already")]
    Twice(u64),
    #[error("output {output:?} of run {run} is not kept, or was dropped")]
    Unknown { run: u64, output: String },
    #[error("{bytes} bytes at {offset} are past the end of output {output:?}, which has {size}")]
    Range { output: String, offset: u64, bytes: u64, size: u64 },
}

impl<V> KeptOutputs<V> {
    pub(crate) fn new() -> Self {
        Self { runs: Mutex::default(), bytes: Arc::default() }
    }

    /// Checks that the outputs of a run can be kept. Runs that execute at the same time may exceed the bound
    /// by their number.
    pub(crate) fn admit(&self, run: u64) -> Result<(), Error> {
        let kept = self.kept();
        if kept.contains_key(&run) {
            return Err(Error::Twice(run));
        }
        if kept.len() >= RUNS_KEPT_MAX { Err(Error::TooMany) } else { Ok(()) }
    }

    /// Takes the room for an output of this size, unless that would exceed [`KEPT_BYTES_MAX`].
    pub(crate) fn take_room(&self, bytes: u64) -> Option<KeptRoom> {
        let taken = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |kept| {
            kept.checked_add(bytes).filter(|&kept| kept <= KEPT_BYTES_MAX)
        });
        taken.ok().map(|_| KeptRoom { bytes, total: Arc::clone(&self.bytes) })
    }

    pub(crate) fn insert(&self, run: u64, outputs: Vec<Arc<KeptOutput<V>>>) {
        self.kept().insert(run, outputs);
    }

    /// Drops the outputs of a run. An output that is already in use stays alive.
    pub(crate) fn remove(&self, run: u64) {
        let removed = self.kept().remove(&run);
        // Dropped outside the lock, because this frees device memory.
        drop(removed);
    }

    pub(crate) fn find(&self, part: OutputPart) -> Result<KeptOutputBytes<V>, Error> {
        let OutputPart { run, output: name, offset, bytes } = part;
        let kept = self.kept();
        let found = kept.get(&run).and_then(|outputs| outputs.iter().find(|output| output.name == name));
        let Some(output) = found else { return Err(Error::Unknown { run, output: name }) };
        match offset.checked_add(bytes).filter(|&end| end <= output.bytes) {
            Some(end) => Ok(KeptOutputBytes { output: Arc::clone(output), bytes: offset..end }),
            None => Err(Error::Range { output: name, offset, bytes, size: output.bytes }),
        }
    }

    fn kept(&self) -> MutexGuard<'_, OutputsByRun<V>> {
        // Ignores a poisoned lock: no foreign code runs under the lock, so the map is consistent.
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(kept: &KeptOutputs<()>, bytes: u64) -> Vec<Arc<KeptOutput<()>>> {
        let name = "y".to_owned();
        let _room = kept.take_room(bytes).unwrap();
        vec![Arc::new(KeptOutput { name, datatype: DataType::Uint8, bytes, value: (), _room })]
    }

    fn part(run: u64, offset: u64, bytes: u64) -> OutputPart {
        OutputPart { run, output: "y".to_owned(), offset, bytes }
    }

    #[test]
    fn found_bytes_are_within_the_output_and_outlive_its_removal() {
        let kept = KeptOutputs::new();
        kept.insert(1, output(&kept, 10));
        let found = kept.find(part(1, 4, 6)).unwrap();
        assert_eq!(found.bytes, 4..10);
        for (offset, bytes) in [(4, 7), (u64::MAX, 1)] {
            assert!(matches!(kept.find(part(1, offset, bytes)), Err(Error::Range { .. })));
        }
        kept.remove(1);
        assert_eq!(found.output.bytes, 10);
        let unknown = Error::Unknown { run: 1, output: "y".to_owned() };
        assert_eq!(kept.find(part(1, 0, 1)).unwrap_err(), unknown);
    }

    #[test]
    fn outputs_have_room_up_to_the_limit_of_bytes() {
        let kept = KeptOutputs::new();
        kept.insert(1, output(&kept, KEPT_BYTES_MAX - 10));
        let has_room = |bytes| kept.take_room(bytes).is_some();
        assert_eq!((has_room(10), has_room(11), has_room(u64::MAX)), (true, false, false));
        let copied = kept.find(part(1, 0, 1)).unwrap();
        kept.remove(1);
        assert!(!has_room(11), "the output is still copied");
        drop(copied);
        assert!(has_room(KEPT_BYTES_MAX));
    }

    #[test]
    fn runs_are_kept_up_to_the_bound_and_once_each() {
        let kept = KeptOutputs::new();
        for run in 0..RUNS_KEPT_MAX as u64 {
            assert_eq!(kept.admit(run), Ok(()));
            kept.insert(run, output(&kept, 1));
        }
        assert_eq!((kept.admit(7), kept.admit(1000)), (Err(Error::Twice(7)), Err(Error::TooMany)));
        kept.remove(7);
        assert_eq!(kept.admit(7), Ok(()));
    }
}
