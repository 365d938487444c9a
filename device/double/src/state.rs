//! The tables of the double's objects. One lock guards all tables. A stream's thread takes the lock only
//! for look-ups, and never while it holds the lock of its queue, so a call may hold the lock and look into
//! queues.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::context::VisibleDevice;
use crate::event::Event;
use crate::graph::Graph;
use crate::green::{GreenContext, SmSet};
use crate::host::HostRange;
use crate::memory::Memory;
use crate::module::{Function, Module};
use crate::stream::DeviceStream;

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Visible devices, in the driver's order.
    pub(crate) devices: Vec<VisibleDevice>,
    pub(crate) memory: Memory,
    /// Pinned host memory by its first address.
    pub(crate) host: BTreeMap<u64, HostRange>,
    pub(crate) streams: BTreeMap<usize, Arc<DeviceStream>>,
    /// Default streams by their context.
    pub(crate) default_streams: BTreeMap<usize, Arc<DeviceStream>>,
    pub(crate) events: BTreeMap<usize, Arc<Event>>,
    pub(crate) modules: BTreeMap<usize, Module>,
    pub(crate) functions: BTreeMap<usize, Function>,
    pub(crate) graphs: BTreeMap<usize, Graph>,
    pub(crate) executable_graphs: BTreeMap<usize, Graph>,
    pub(crate) resource_descriptions: BTreeMap<usize, SmSet>,
    pub(crate) green_contexts: BTreeMap<usize, GreenContext>,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

pub(crate) fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a new name for an object. The name is no address of the process: a program that reads through
/// a handle faults.
pub(crate) fn next_id() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x100);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

impl State {
    /// Returns all streams, the default streams too.
    pub(crate) fn all_streams(&self) -> impl Iterator<Item = &Arc<DeviceStream>> {
        self.streams.values().chain(self.default_streams.values())
    }

    /// Returns a description of queued work that uses a byte of the range.
    pub(crate) fn queued_use(&self, at: u64, bytes: u64) -> Option<String> {
        self.all_streams().find_map(|stream| stream.queued_use(at, bytes))
    }
}
